"""Functions of the user that a setting names as "module:function"."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from jaxpipe.config.errors import ConfigError, first_line


def is_custom(name: str) -> bool:
    """Whether the value of a setting names a function outside jaxpipe."""
    return ":" in name


def load_function(setting: str, name: str, arguments: str) -> Callable[..., Any]:
    """Import the function `name` of a setting; `arguments` are those it takes, for messages.

    Raises `ConfigError` where the module cannot be imported, or has no such function.
    """
    module, _, function = name.partition(":")
    where = f"{setting}={name!r}"
    if not module:
        raise ConfigError(f"{where} names no module: give it as module:function.")
    try:
        found = getattr(import_module(module), function, None)
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigError(
            f"{where}: module {module!r} cannot be imported ({first_line(error)}): run in the "
            f"directory of {module.split('.')[0]}.py, or add that to PYTHONPATH."
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{where}: module {module!r} has no function {function!r}: define it there, as "
            f"{function or 'name'}({arguments})."
        )
    return found
