"""Errors in the user's input."""

from jaxpipe.config.secrets import mask_secrets


class ConfigError(ValueError):
    """The user's input cannot be used; the message says what is wrong, where, and what to do.

    Secrets in addresses are masked in it.
    """

    def __init__(self, message: str = ""):
        super().__init__(mask_secrets(message))


def first_line(error: BaseException) -> str:
    """First line of an error's message, at most 200 characters, to quote in a message."""
    return mask_secrets((str(error).splitlines() or [type(error).__name__])[0])[:200]
