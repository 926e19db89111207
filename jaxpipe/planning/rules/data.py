"""Rules of data sources, of packing, and of the lengths of rows."""

from math import inf, prod

from jaxpipe.config import Config, ConfigError


def _check_sources(config: Config) -> None:
    """Raise `ConfigError` if sources of data have nothing to read, or nothing reads files.

    `data.sources` must have weights with a finite sum above 0.

    `data.sources` must each have a path.

    `data.source='file'` needs `data.path`, unless there are `data.sources`; a plan needs neither.

    `data.heldout_path` needs `data.source='file'` or `data.sources`.

    `data.ignore_columns` needs `data.source='file'` or `data.sources`.
    """
    data = config.data
    weights = [source.weight for source in data.sources]
    if weights and not 0 < sum(weights) < inf:
        raise ConfigError(
            f"the weights of data.sources are shares of the samples, but they are {weights}: "
            f"give finite numbers, at least one of them above 0."
        )
    if not all(source.path for source in data.sources):
        raise ConfigError("a table of data.sources has an empty path: name what it reads.")
    of_files = {"heldout_path": data.heldout_path, "ignore_columns": list(data.ignore_columns)}
    for key, value in of_files.items():
        if value and data.source != "file" and not data.sources:
            raise ConfigError(
                f"data.{key}={value!r} is read only with data.source='file' or data.sources, but "
                f"data.source is {data.source!r}: set one of them, or leave data.{key} out."
            )


def _check_order(config: Config) -> None:
    """Raise `ConfigError` if rows of equal attention should stay in order.

    `data.balance_rows` above 1 needs `data.shuffle`.
    """
    data = config.data
    if data.balance_rows > 1 and not data.shuffle:
        raise ConfigError(
            f"data.balance_rows={data.balance_rows} with data.shuffle=false: rows of equal "
            f"attention are brought together, so they do not stay in order; shuffle, or leave "
            f"balance_rows out."
        )


def _check_lengths(config: Config) -> None:
    """Raise `ConfigError` if a row length that may occur does not divide into equal shards.

    `train.length_bucket` must, with `train.variable_length`, be a multiple of
    `train.pad_to_multiple_of` x the equal parts of a sequence: `parallel.slices` x `parallel.cp`
    (twice for a ring) x `parallel.tp` (with `parallel.sequence_parallel`).

    `train.loss_chunks` must, with `train.variable_length`, divide `train.pad_to_multiple_of` (x
    `parallel.tp` with `parallel.sequence_parallel`).
    """
    train, parallel = config.train, config.parallel
    if not train.variable_length:
        return
    multiple, tp = train.pad_to_multiple_of, parallel.tp if parallel.sequence_parallel else 1
    if train.length_bucket % (multiple * config.sequence_shards):
        cuts = {"parallel.slices": parallel.slices, "parallel.cp": parallel.cp, "parallel.tp": tp}
        cuts["halves of overlap_halves"] = config.layer_slices // parallel.slices
        product = "".join(f" x {name}={size}" for name, size in cuts.items() if size > 1)
        product += " x 2 blocks per device" if config.sequence_shards > prod(cuts.values()) else ""
        raise ConfigError(
            f"train.length_bucket={train.length_bucket} must be a multiple of "
            f"train.pad_to_multiple_of={multiple}{product}: every equal part of a sequence is a "
            f"multiple of pad_to_multiple_of; change one of them, or set length_bucket=0."
        )
    if multiple * tp % train.loss_chunks:
        raise ConfigError(
            f"train.loss_chunks={train.loss_chunks} must divide train.pad_to_multiple_of={multiple}"
            f"{f' x parallel.tp={tp}' if tp > 1 else ''} with train.variable_length: every length "
            f"is cut into so many chunks; change one of them."
        )


def check_data_given(config: Config) -> None:
    """Raise `ConfigError` if a run would have nothing to read, which a plan does not need."""
    data = config.data
    if data.source == "file" and not data.path and not data.sources:
        raise ConfigError(
            "data.source='file' needs data.path: give a file of token ids, or a folder of them."
        )


DATA_CHECKS = (_check_sources, _check_order, _check_lengths)
