"""Packages that only some inputs need, imported where they are needed."""

import importlib
from types import ModuleType

from jaxpipe.config import ConfigError


def needed(package: str, purpose: str) -> ModuleType:
    """A module of a package of the extra `data`.

    Raises `ConfigError` where the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs the package {package.split('.')[0]}: pip install 'jaxpipe[data]'."
        ) from error
