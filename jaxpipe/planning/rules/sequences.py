"""Rules of sequence lengths, sequence slices, and sequences sharded over devices."""

from math import prod

from jaxpipe.config import Config, ConfigError
from jaxpipe.core.contract.sequence import FULL_SEQUENCE, FullSequence
from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.planning.devices import Devices


def _check_parts(config: Config) -> None:
    """Check that sequences divide into equal slices, slices over cp, then over tp or loss chunks.

    `train.seq_len` must be a multiple of `parallel.slices` x `parallel.cp` x `parallel.tp` (with
    `parallel.sequence_parallel`), of `parallel.slices` x `parallel.cp` x `train.loss_chunks`, and,
    for `parallel.cp_method='ring'`, of `parallel.slices` x 2 x `parallel.cp` / `parallel.cp_heads`.
    In models of the family `deepseek_v4`, with slices or `parallel.cp`, also of `parallel.slices` x
    `parallel.cp` x the tokens of an entry, and so must be `train.pad_to_multiple_of`.
    """
    parallel, train = config.parallel, config.train
    slices = {
        "parallel.slices": parallel.slices,
        "halves of parallel.overlap_halves": config.layer_slices // parallel.slices,
    }
    shards = slices | {"parallel.cp": parallel.cp}
    over_tp = {"parallel.tp": parallel.tp if parallel.sequence_parallel else 1}
    halves = slices | {"blocks of a ring": _halves(config)}
    chunks = {"train.loss_chunks": train.loss_chunks}
    multiple = config.model.shard_multiple if prod(shards.values()) > 1 else 1
    entries = {"tokens of the model's entries": multiple}
    for more in (halves, shards | over_tp, shards | chunks, shards | entries):
        if train.seq_len % prod(more.values()):
            product = " x ".join(f"{name}={size}" for name, size in more.items() if size > 1)
            raise ConfigError(
                f"train.seq_len={train.seq_len} must be a multiple of {product}: it is cut into "
                f"equal parts; change one of them."
            )
    if train.variable_length and train.pad_to_multiple_of % multiple:
        raise ConfigError(
            f"train.pad_to_multiple_of={train.pad_to_multiple_of} must be a multiple of the "
            f"{multiple} tokens of the model's entries, of which each shard or slice of a row has "
            f"complete ones: raise it."
        )


def _halves(config: Config) -> int:
    """Zigzag chunks of a slice, two per position of ring attention; 1: there is no ring."""
    return 2 * config.parallel.ring if config.parallel.rings else 1


def check_attention(config: Config, devices: Devices | None = None) -> None:
    """Raise `ConfigError` if the model's attention cannot reach or mask keys as settings ask.

    `devices` None: they are not known, and what a kernel asks of them and of dtypes is not checked.
    """
    parallel, train = config.parallel, config.train
    case = AttentionCase(
        FullSequence(parallel.cp, parallel.exchanging) if parallel.cp > 1 else FULL_SEQUENCE,
        slices=config.layer_slices > 1,
        documents=config.data.documents,
    )
    if devices is not None:
        case = case._replace(
            rows=(train.microbatch_size, train.seq_len),
            dtype=train.compute_dtype,
            platform=devices.platform,
            capability=devices.capability,
            deterministic=train.deterministic,
        )
    for sentence in config.model.unmet_by_attention(case, parallel.tp):
        raise ConfigError(sentence)


SEQUENCE_CHECKS = (_check_parts, check_attention)
