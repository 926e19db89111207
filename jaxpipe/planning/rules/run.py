"""Rules of the optimizer, of the checkpoint that a run starts from, and of checks of its steps."""

from jaxpipe.config import Config, ConfigError, is_custom
from jaxpipe.model import FAMILIES
from jaxpipe.planning.cost.costs import costs_of


def _check_optimizer(config: Config) -> None:
    """Raise `ConfigError` if there is no such optimizer, or it couples parameters.

    `optimizer.name` must be a name of the table, or `module:function` with a function of
    `(learning_rate, config)` that returns an `optax.GradientTransformation` which updates every
    parameter by itself.
    """
    from jaxpipe.optimizer import check_independent, kind_of, learning_rate, load_custom

    optimizer = config.optimizer
    kind_of(optimizer.name)
    if is_custom(optimizer.name):
        custom = load_custom(optimizer, learning_rate(optimizer, config.train.steps))
        costs = costs_of(config)
        layers = tuple(kind.parameters.shapes for kind in costs.kinds.values())
        params = {"embed_head": costs.embed_head.shapes, "layers": layers}
        check_independent(optimizer.name, custom, params)


def _check_start(config: Config) -> None:
    """Raise `ConfigError` if settings do not fit the checkpoint that a run starts from.

    `checkpoint.allow_changed` may only name fields of `model`.

    `checkpoint.export_every` must be a multiple of `checkpoint.every`, or of `train.steps` if that
    is 0.

    `checkpoint.export_every` needs a model that Hugging Face has a form for.
    """
    checkpoint, model = config.checkpoint, config.model
    if checkpoint.export_every:
        try:
            longest = model.max_seq_len or config.train.seq_len
            FAMILIES[model.family].format_of(model).written(model, "float32", longest)
        except ValueError as error:
            raise ConfigError(
                f"checkpoint.export_every={checkpoint.export_every}: {str(error).rstrip('.')}; "
                f"change the model, or leave export_every out."
            ) from error
    saves = checkpoint.every or config.train.steps
    if checkpoint.export_every % saves:
        raise ConfigError(
            f"checkpoint.export_every={checkpoint.export_every} must be a multiple of the {saves} "
            f"steps between saves (checkpoint.every, or train.steps): an export is made of a "
            f"checkpoint; change one of them."
        )
    fields = [f"model.{name}" for name in type(model).__struct_fields__]
    for key in checkpoint.allow_changed:
        if key not in fields:
            raise ConfigError(
                f"checkpoint.allow_changed has {key!r}, but what it may name are the fields "
                f"{', '.join(fields)}."
            )


def _check_spikes(config: Config) -> None:
    """Raise `ConfigError` if a run could not roll back after loss spikes.

    `train.spike_rollbacks` needs `checkpoint.every` x (`checkpoint.keep` - 1) to be at least
    `train.spike_limit`, and above 0, so that a checkpoint from before the spikes is kept.
    """
    train, checkpoint = config.train, config.checkpoint
    if not train.spike_rollbacks:
        return
    every, keep = checkpoint.every, checkpoint.keep
    if every * (keep - 1) < max(train.spike_limit, 1):
        remedies = ["set checkpoint.every"] if every == 0 else []
        remedies += ["set checkpoint.keep to 2 or more"] if keep == 1 else []
        remedy = " and ".join(remedies) or "raise checkpoint.every or checkpoint.keep"
        raise ConfigError(
            f"train.spike_rollbacks={train.spike_rollbacks} need a checkpoint from before the "
            f"spikes, but checkpoint.every={every} and checkpoint.keep={keep} keep none that is "
            f"train.spike_limit={train.spike_limit} steps old: {remedy}."
        )


def _check_corruption(config: Config) -> None:
    """Raise `ConfigError` if steps could not be checked for corruption.

    `train.corruption_check_every` needs at least 3 devices, so that two of three results agree, and
    excludes `parallel.reshard_after_forward`.
    """
    train, parallel = config.train, config.parallel
    unmet = {
        f"{parallel.devices} devices": 0 < parallel.devices < 3,
        "parallel.reshard_after_forward=true": parallel.reshards,
    }
    if train.corruption_check_every and any(unmet.values()):
        raise ConfigError(
            f"train.corruption_check_every={train.corruption_check_every} compares the bits of "
            f"single steps on three orders of the devices, but there is "
            f"{next(what for what, is_so in unmet.items() if is_so)}: change it, or leave "
            f"corruption_check_every out."
        )


RUN_CHECKS = (
    _check_optimizer,
    _check_start,
    _check_spikes,
    _check_corruption,
)
