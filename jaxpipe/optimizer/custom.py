"""The run's own optimizer: `optimizer.name = "module:function"`."""

import traceback

import optax

from jaxpipe.config import ConfigError, OptimizerConfig, first_line, load_function


def load_custom(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """The transformation that the function `config.name` returns for `(rate, config)`.

    Raises `ConfigError` where the module cannot be imported, has no such function, or the function
    raises or returns anything else.
    """
    where = f"optimizer.name={config.name!r}"
    make = load_function("optimizer.name", config.name, "learning_rate, config")
    try:
        optimizer = make(rate, config)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{where} raises {type(error).__name__} ({first_line(error)}) at {place.filename}:"
            f"{place.lineno}: correct it; it must take (learning_rate, config), a schedule and the "
            f"section [optimizer]."
        ) from error
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"{where} returns a {type(optimizer).__name__}: return an optax.GradientTransformation."
        )
    return optimizer
