"""Bad input, in one sentence."""


class ConfigError(ValueError):
    """Something the user gave cannot be used; the message says what, where and what to do."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, short enough to stand in a sentence of ours."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
