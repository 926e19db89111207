"""Rules between a model's experts and the replicas that share them (expert parallelism)."""

from jaxpipe.config import Config, ConfigError

COUNTED = 255  # most experts of a device under ep: a bfloat16 column numbers them from 1; 0: none


def check_experts(config: Config) -> None:
    """Raise `ConfigError` if a device would have more experts than are counted exactly.

    `model.n_experts` / `parallel.ep` must be at most 255, if `parallel.ep` is above 1.
    """
    ep, experts = config.parallel.ep, config.model.routed_experts
    if ep > 1 and experts // ep > COUNTED:
        raise ConfigError(
            f"model.n_experts={experts} on parallel.ep={ep} replicas are more than {COUNTED} on "
            f"each, which is how far bfloat16 counts them exactly; raise parallel.ep."
        )


def check_recording(config: Config, processes: int = 1) -> None:
    """Raise `ConfigError` if a run with this number of processes cannot record routes."""
    if not config.model.routed_experts:
        raise ConfigError("--record-routes: model.n_experts=0, no token is routed; leave it out.")
    if processes > 1:
        raise ConfigError(
            f"--record-routes with {processes} processes: one writes the whole batch; use one."
        )
