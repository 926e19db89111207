"""Errors of object stores, whose libraries have no common base, and those of disks beside them."""

import contextlib
import errno
from collections.abc import Iterator

from jaxpipe.config import ConfigError, first_line

# After such errors (by names of classes, by codes, by what TensorStore's texts begin with) the same
# may succeed later.
_NO_ANSWER = ("Connect", "Timeout")
_NO_ANSWER_CODES = (errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH)
_NO_ANSWER_STATUSES = ("UNAVAILABLE", "DEADLINE_EXCEEDED")


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Raise errors of stores as `OSError` with a `strerror`."""
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        if error.strerror is not None:
            raise
        own = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        raise own(error.errno or errno.EIO, first_line(error)) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {first_line(error)}") from error


def does_not_answer(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is that a disk or store does not answer, perhaps for now."""
    if error is None:
        return False
    names = [kind.__name__ for kind in type(error).__mro__]
    return (
        any(word in name for name in names for word in _NO_ANSWER)
        or getattr(error, "errno", None) in _NO_ANSWER_CODES
        or str(error).startswith(_NO_ANSWER_STATUSES)
        or does_not_answer(error.__cause__)
    )


def describe(error: OSError, what: str, otherwise: str) -> str:
    """Return the sentence for the user: that `what` does not answer, or else `otherwise`."""
    if not does_not_answer(error):
        return otherwise
    return (
        f"{what} does not answer ({error.strerror}): see that this machine reaches it, and start "
        f"the same command again."
    )
