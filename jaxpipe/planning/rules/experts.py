"""Rules between a model's experts and the devices that share them (expert parallelism)."""

from jaxpipe.config import Config, ConfigError

COUNTED = 255  # most experts of a device under ep: a bfloat16 column numbers them from 1; 0: none


def check_experts(config: Config) -> None:
    """Raise `ConfigError` if devices cannot share experts, or would have too many to count exactly.

    `parallel.dp`, with `parallel.ep_over_tp` `parallel.dp` x `parallel.tp`, must be a multiple of
    `parallel.dp_replicate` x `parallel.ep`.

    `parallel.ep` must, with `parallel.ep_over_tp`, be a multiple of `parallel.tp`.

    `model.n_experts` / `parallel.ep` must be at most 255, if `parallel.ep` is above 1; so must the
    experts of a host with `parallel.ep_per_host`.
    """
    parallel, experts = config.parallel, config.model.routed_experts
    ep, tp, groups = parallel.ep, parallel.tp, parallel.dp_replicate
    if parallel.ep_over_tp and ep % tp:
        raise ConfigError(
            f"parallel.ep={ep} with parallel.ep_over_tp=true must be a multiple of parallel.tp="
            f"{tp}: all devices along tp share the experts; change one of them, or set "
            f"parallel.ep_over_tp=false."
        )
    if parallel.dp > 0 and parallel.dp % (groups * parallel.ep_replicas):
        over_tp = f" x parallel.tp={tp}" if parallel.ep_over_tp else ""
        sharers = "devices" if over_tp else "replicas"
        raise ConfigError(
            f"parallel.dp={parallel.dp}{over_tp} must be a multiple of parallel.dp_replicate="
            f"{groups} x parallel.ep={ep}: ep {sharers} share the experts; change one of them."
        )
    holders, what = ep, "devices"
    if parallel.ep_hosts > 1:
        holders, what = parallel.ep_hosts, f"devices in {parallel.ep_hosts} hosts"
    if ep > 1 and experts // holders > COUNTED:
        raise ConfigError(
            f"model.n_experts={experts} on parallel.ep={ep} {what} are more than {COUNTED} on "
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
