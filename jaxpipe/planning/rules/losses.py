"""Rules of losses other than cross-entropy."""

from jaxpipe.config import Config, ConfigError, is_custom

_OF_BATCHES = (
    "inputs", "targets", "positions", "segments", "slice", "samples", "real", "routes",
)  # fmt: skip


def _check_loss(config: Config) -> None:
    """Raise `ConfigError` if there is no such loss, or its rows are read by none.

    `train.loss` must be `cross_entropy`, `dpo`, or `module:function` with a function of `(logprobs,
    rows)` as `jaxpipe/model/objective.py` defines it.

    `train.loss_rows` has no name twice, and none that batches have of themselves.
    """
    train, loss = config.train, config.train.loss
    if loss not in ("cross_entropy", "dpo") and not is_custom(loss):
        raise ConfigError(
            f"train.loss={loss!r} is no loss: choose cross_entropy, dpo, or 'module:function' of "
            f"your own."
        )
    for row, name in zip(train.loss_rows, names := [row.split("[")[0] for row in train.loss_rows]):
        if name in _OF_BATCHES or names.count(name) > 1:
            why = "is twice" if name not in _OF_BATCHES else "is a name that batches have already"
            raise ConfigError(f"train.loss_rows has {row!r}, which {why}: rename it.")
        if name == "choices" and row == name:
            raise ConfigError(
                "train.loss_rows has 'choices', the tokens at each position whose "
                "log-probabilities a loss reads: say how many, as 'choices[8]'."
            )


def _check_function(config: Config) -> None:
    """Raise `ConfigError` if a loss of log-probabilities cannot be differentiated as a loss is."""
    if config.train.loss != "cross_entropy":
        from jaxpipe.planning.objective import objective_of  # needs jax

        objective_of(config)


def _check_pairs(config: Config) -> None:
    """Raise `ConfigError` if pairs of answers could not be read, or would be divided.

    `train.loss='dpo'` needs an even `train.microbatch_size`, since both answers of a pair are in
    one microbatch.

    `train.loss='dpo'` needs `data.source='file'` or `data.sources`.
    """
    if not config.reads_pairs:
        return
    data, examples = config.data, config.train.microbatch_size
    if examples % 2:
        raise ConfigError(
            f"train.microbatch_size={examples} with train.loss='dpo': both answers of a pair are "
            f"in one microbatch; give an even number."
        )
    if data.source != "file" and not data.sources:
        raise ConfigError(
            f"train.loss='dpo' with data.source={data.source!r}, which has no pairs: set "
            f"data.source=file, and data.path to a folder that `python -m jaxpipe.data prepare "
            f"--pairs` wrote."
        )


LOSS_CHECKS = (_check_loss, _check_pairs, _check_function)
