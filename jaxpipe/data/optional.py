"""Optional packages, imported only when an input needs them."""

import importlib
from types import ModuleType

from jaxpipe.config import ConfigError


def import_optional(package: str, purpose: str, extra: str = "data") -> ModuleType:
    """Import a module of a package from one of jaxpipe's extras.

    `purpose` starts the message. Raises `ConfigError` where the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs the package {package.split('.')[0]}: pip install -e '.[{extra}]'."
        ) from error
