"""The rules of how long sequences are, and how they are cut in time and over devices."""

from math import prod

from jaxpipe.config import Config, ConfigError
from jaxpipe.partition.sequence import WholeSequence


def check_sequences(config: Config) -> None:
    """Raise `ConfigError` at the first rule of lengths, of replicas or of parts that is broken."""
    for check in (_check_replicas, _check_parts, _check_method):
        check(config)


def _check_replicas(config: Config) -> None:
    """Sequences fit the model, and replicas that share them are of one group."""
    parallel, train, longest = config.parallel, config.train, config.model.max_seq_len
    if longest and train.seq_len > longest:
        raise ConfigError(
            f"train.seq_len={train.seq_len} exceeds model.max_seq_len={longest}, the longest "
            f"sequence that the model is made for: shorten it, or raise model.max_seq_len."
        )
    if parallel.dp % parallel.cp:
        raise ConfigError(
            f"parallel.cp={parallel.cp} must divide parallel.dp={parallel.dp}: so many of the "
            f"replicas share every sequence; change one of them."
        )
    if parallel.cp_heads > 1 and parallel.cp_method != "ring":
        raise ConfigError(
            f"parallel.cp_heads={parallel.cp_heads} with parallel.cp_method="
            f"{parallel.cp_method!r}: it says how many replicas are one place of a ring; set "
            f"parallel.cp_method=ring, or leave parallel.cp_heads out."
        )
    if parallel.cp % parallel.cp_heads:
        raise ConfigError(
            f"parallel.cp_heads={parallel.cp_heads} must divide parallel.cp={parallel.cp}: so many "
            f"replicas are one place of a ring; change one of them."
        )
    if parallel.dp % (parallel.dp_replicate * parallel.cp):
        raise ConfigError(
            f"parallel.dp_replicate={parallel.dp_replicate} x parallel.cp={parallel.cp} must "
            f"divide parallel.dp={parallel.dp}: replicas form so many groups, and those of a group "
            f"share sequences; change one of them."
        )
    if parallel.dp_replicate > 1 and not parallel.zero_stage:
        raise ConfigError(
            f"parallel.dp_replicate={parallel.dp_replicate} with parallel.zero_stage=0: groups "
            f"differ only where replicas hold parts; raise zero_stage, or leave dp_replicate out."
        )


def _check_parts(config: Config) -> None:
    """Sequences are cut into equal slices, these over cp, then tp or chunks of the loss."""
    parallel, train = config.parallel, config.train
    stretches = {"parallel.slices": parallel.slices, "parallel.cp": parallel.cp}
    over_tp = {"parallel.tp": parallel.tp if parallel.sequence_parallel else 1}
    halves = {"parallel.slices": parallel.slices, "the stretches of a ring": _halves(config)}
    chunks = {"train.loss_chunks": train.loss_chunks}
    for more in (halves, stretches | over_tp, stretches | chunks):
        if train.seq_len % prod(more.values()):
            product = " x ".join(f"{name}={size}" for name, size in more.items() if size > 1)
            raise ConfigError(
                f"train.seq_len={train.seq_len} must be a multiple of {product}: it is cut into "
                f"equal parts; change one of them."
            )


def _halves(config: Config) -> int:
    """Stretches that the tokens of a slice are cut into for a ring; 1: there is none."""
    return 2 * config.parallel.ring if config.parallel.rings else 1


def _check_method(config: Config) -> None:
    """Replicas that share sequences reach all keys in a way that this model has."""
    parallel, model = config.parallel, config.model
    if parallel.cp == 1:
        return
    for sentence in model.unmet_by_context(
        WholeSequence(parallel.cp, parallel.exchanging),
        tp=parallel.tp,
        dtype=config.train.compute_dtype,
        packed=bool(config.data.documents),
    ):
        raise ConfigError(sentence)
