"""The run's own optimizer: `optimizer.name = "module:function"`."""

from importlib import import_module

import optax

from jaxpipe.config import ConfigError, OptimizerConfig, first_line


def is_custom(name: str) -> bool:
    """Whether an `optimizer.name` is a function outside jaxpipe."""
    return ":" in name


def load_custom(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """The transformation that the function `config.name` returns for `(rate, config)`.

    Raises `ConfigError` where the module cannot be imported, has no such function, or the function
    raises or returns anything else.
    """
    module, _, function = config.name.partition(":")
    where = f"optimizer.name={config.name!r}"
    try:
        make = getattr(import_module(module), function, None)
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigError(
            f"{where}: module {module!r} cannot be imported ({first_line(error)}): run in the "
            f"directory of {module.split('.')[0]}.py, or add that to PYTHONPATH."
        ) from error
    if not callable(make):
        raise ConfigError(
            f"{where}: module {module!r} has no function {function!r}: define it there, as "
            f"{function or 'name'}(learning_rate, config)."
        )
    try:
        optimizer = make(rate, config)
    except Exception as error:
        raise ConfigError(
            f"{where} raises {type(error).__name__} ({first_line(error)}): it must take "
            f"(learning_rate, config), a schedule and the section [optimizer]."
        ) from error
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"{where} returns a {type(optimizer).__name__}: return an optax.GradientTransformation."
        )
    return optimizer
