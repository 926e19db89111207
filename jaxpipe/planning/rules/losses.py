"""Rules of losses other than cross-entropy."""

from jaxpipe.config import Config, ConfigError, is_custom

_OF_BATCHES = (
    "inputs", "targets", "positions", "segments", "slice", "samples", "real", "routes",
)  # fmt: skip


def _check_loss(config: Config) -> None:
    """Raise `ConfigError` if there is no such loss, or its rows are read by none.

    `train.loss` must be `cross_entropy`, `dpo`, or `module:function` with a function of `(logprobs,
    rows)` as `jaxpipe/model/objective.py` defines it.

    `train.loss_rows` and `train.loss_temperature` other than 1 need a `train.loss` of your own.

    `train.loss_rows` has no name twice, and none that batches have of themselves.
    """
    train, loss = config.train, config.train.loss
    if loss not in ("cross_entropy", "dpo") and not is_custom(loss):
        raise ConfigError(
            f"train.loss={loss!r} is no loss: choose cross_entropy, dpo, or 'module:function' of "
            f"your own."
        )
    if train.loss_rows and not is_custom(loss):
        raise ConfigError(
            f"train.loss_rows={list(train.loss_rows)} are read by a loss of your own, but "
            f"train.loss={loss!r}: name it as 'module:function', or leave loss_rows out."
        )
    if train.loss_temperature != 1 and not is_custom(loss):
        raise ConfigError(
            f"train.loss_temperature={train.loss_temperature} divides the logits for a loss of "
            f"your own, but train.loss={loss!r}: set it to 1, or name a 'module:function'."
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
    """Raise `ConfigError` if a loss of log-probabilities does not fit the other settings.

    `train.loss` other than `cross_entropy` excludes `parallel.cp` and `parallel.slices` above 1,
    which divide a sequence, `train.z_loss`, and `model.mtp_depth`.
    """
    train, parallel = config.train, config.parallel
    if train.loss == "cross_entropy":
        return
    excluded = {
        f"parallel.cp={parallel.cp}": parallel.cp > 1,
        f"parallel.slices={parallel.slices}": parallel.slices > 1,
        f"train.z_loss={train.z_loss}": train.z_loss,
        f"model.mtp_depth={config.model.tokens_ahead}": config.model.tokens_ahead,
    }
    if conflicts := [setting for setting, is_set in excluded.items() if is_set]:
        raise ConfigError(
            f"train.loss={train.loss!r} is computed of the log-probabilities of whole rows alone, "
            f"which excludes {conflicts[0]}: leave it out, or train on cross_entropy."
        )
    from jaxpipe.planning.objective import objective_of  # needs jax

    objective_of(config)


def _check_pairs(config: Config) -> None:
    """Raise `ConfigError` if pairs of answers could not be read, or would be divided.

    `train.loss='dpo'` needs an even `train.microbatch_size`, since both answers of a pair are in
    one microbatch.

    `train.loss='dpo'` excludes `data.packing`.

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
    if data.packing != "none":
        raise ConfigError(
            f"data.packing={data.packing!r} with train.loss='dpo': every answer is a row of its "
            f"own; set data.packing=none, and train.variable_length=true for less padding."
        )
    if data.source != "file" and not data.sources:
        raise ConfigError(
            f"train.loss='dpo' with data.source={data.source!r}, which has no pairs: set "
            f"data.source=file, and data.path to a folder that `python -m jaxpipe.data prepare "
            f"--pairs` wrote."
        )


LOSS_CHECKS = (_check_loss, _check_pairs, _check_function)
