"""Errors in the user's input."""


class ConfigError(ValueError):
    """The user's input cannot be used; the message says what is wrong, where, and what to do."""


def first_line(error: BaseException) -> str:
    """First line of an error's message, at most 200 characters, to quote in a message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
