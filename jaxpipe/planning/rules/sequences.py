"""Rules of sequence lengths, sequence slices, and sequences sharded over devices."""

from math import prod

from jaxpipe.config import Config, ConfigError
from jaxpipe.core.contract.sequence import FullSequence


def _check_settings(config: Config) -> None:
    """Check that sequences fit the model, and that settings of context parallelism fit each other.

    `train.seq_len` must be at most `model.max_seq_len`, if that is given.

    `parallel.cp_heads` above 1 needs `parallel.cp_method='ring'`.

    `parallel.cp_heads` must divide `parallel.cp`.

    `parallel.dp_replicate` above 1 needs a `parallel.zero_stage` above 0.
    """
    parallel, train, longest = config.parallel, config.train, config.model.max_seq_len
    if longest and train.seq_len > longest:
        raise ConfigError(
            f"train.seq_len={train.seq_len} exceeds model.max_seq_len={longest}, the longest "
            f"sequence that the model is made for: shorten it, or raise model.max_seq_len."
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
    if parallel.dp_replicate > 1 and not parallel.zero_stage:
        raise ConfigError(
            f"parallel.dp_replicate={parallel.dp_replicate} with parallel.zero_stage=0: groups "
            f"differ only where replicas hold parts; raise zero_stage, or leave dp_replicate out."
        )


def _check_parts(config: Config) -> None:
    """Check that sequences divide into equal slices, slices over cp, then over tp or loss chunks.

    `train.seq_len` must be a multiple of `parallel.slices` x `parallel.cp` x `parallel.tp` (with
    `parallel.sequence_parallel`), of `parallel.slices` x `parallel.cp` x `train.loss_chunks`, and,
    for `parallel.cp_method='ring'`, of `parallel.slices` x 2 x `parallel.cp` / `parallel.cp_heads`.
    """
    parallel, train = config.parallel, config.train
    shards = {"parallel.slices": parallel.slices, "parallel.cp": parallel.cp}
    over_tp = {"parallel.tp": parallel.tp if parallel.sequence_parallel else 1}
    halves = {"parallel.slices": parallel.slices, "blocks of a ring": _halves(config)}
    chunks = {"train.loss_chunks": train.loss_chunks}
    for more in (halves, shards | over_tp, shards | chunks):
        if train.seq_len % prod(more.values()):
            product = " x ".join(f"{name}={size}" for name, size in more.items() if size > 1)
            raise ConfigError(
                f"train.seq_len={train.seq_len} must be a multiple of {product}: it is cut into "
                f"equal parts; change one of them."
            )


def _halves(config: Config) -> int:
    """Zigzag chunks of a slice, two per position of ring attention; 1: there is no ring."""
    return 2 * config.parallel.ring if config.parallel.rings else 1


def _check_method(config: Config) -> None:
    """Check that the model supports how slices, and replicas that share them, reach all keys."""
    parallel, model = config.parallel, config.model
    for sentence in model.unmet_by_slices() if parallel.slices > 1 else ():
        raise ConfigError(sentence)
    if parallel.cp == 1:
        return
    for sentence in model.unmet_by_context(
        FullSequence(parallel.cp, parallel.exchanging),
        tp=parallel.tp,
        packed=bool(config.data.documents),
    ):
        raise ConfigError(sentence)


SEQUENCE_CHECKS = (_check_settings, _check_parts, _check_method)
