"""Rules between a model's experts and the replicas that share them (expert parallelism)."""

from jaxpipe.config import Config, ConfigError

COUNTED = 255  # most experts of a device under ep: a bfloat16 column numbers them from 1; 0: none


def check_experts(config: Config) -> None:
    """Raise `ConfigError` if replicas cannot have equal shards of the experts.

    `parallel.ep_buffer_factor` needs a `parallel.ep` above 1.

    `model.n_experts` must be a multiple of `parallel.ep`, and above 0 if that is above 1.

    `parallel.ep_buffer_factor` excludes `model.capacity_factor`.

    `model.n_experts` / `parallel.ep` must be at most 255, if `parallel.ep` is above 1.
    """
    parallel, experts = config.parallel, config.model.routed_experts
    ep = parallel.ep
    if ep == 1:
        if parallel.ep_buffer_factor:
            raise ConfigError(
                f"parallel.ep_buffer_factor={parallel.ep_buffer_factor} with parallel.ep=1: "
                f"nothing is sent; set parallel.ep, or leave it out."
            )
        return
    if experts % ep or not experts:
        raise ConfigError(
            f"model.n_experts={experts} must be a multiple of parallel.ep={ep}: so many replicas "
            f"have equal parts of the experts; change one of them."
        )
    if parallel.ep_buffer_factor and config.model.capacity_factor:
        raise ConfigError(
            f"parallel.ep_buffer_factor={parallel.ep_buffer_factor} with model.capacity_factor="
            f"{config.model.capacity_factor}: the slots of a capacity are the buffers; leave one "
            f"of them out."
        )
    if experts // ep > COUNTED:
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
