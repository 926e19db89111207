"""Errors of disks and object stores: which of them pass by themselves, and repeating what failed.

The libraries of object stores have no common base of errors. An error is judged by its chain of
causes: by operating-system codes, by HTTP statuses and names of S3's errors, and by the first words
of TensorStore's texts.
"""

import contextlib
import errno
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jaxpipe.config import ConfigError, first_line
from jaxpipe.runtime import position

Result = TypeVar("Result")

LIMIT = 150.0  # seconds for which an error that passes is waited out
_LONGEST_PAUSE = 5.0  # seconds between two attempts
_BEAT = 0.5  # seconds between two signs of life to the watchdog, which must not end the wait

_NAMES = ("Connect", "Timeout", "IncompleteRead", "ServerDisconnected", "ClientPayload")
_CODES = {
    getattr(errno, name, None)
    for name in (
        "EIO", "ESTALE", "ETIMEDOUT", "ENOTCONN", "ESHUTDOWN", "EREMOTEIO", "ECONNRESET",
        "ECONNABORTED", "ECONNREFUSED", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH",
        "ENETRESET", "ENOLINK", "ECOMM", "EPROTO", "EPIPE", "ETIME", "EAGAIN", "EBUSY", "EINTR",
        "EMFILE", "ENFILE", "ENOBUFS",
    )
} - {None}  # fmt: skip
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_STATUSES = {408, 425, 429, *range(500, 600)} - {501, 505}
_REFUSALS = {401, 403}  # also of credentials that have expired, and are being renewed
_EXPIRED = ("Expired", "TokenRefreshRequired", "RequestTimeTooSkewed")
_TENSORSTORE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "RESOURCE_EXHAUSTED")
_TENSORSTORE_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_OS_CODE = re.compile(r"(?:os_error_code=|\[errno )(\d+)")  # in texts of TensorStore and Arrow
_HTTP_STATUS = re.compile(r"HTTP response code: (\d+)")  # in TensorStore's texts


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
        raise own(error.errno or _code_of(own), first_line(error)) from error
    except Exception as error:
        raise OSError(errno.EINVAL, f"{type(error).__name__}: {first_line(error)}") from error


def _code_of(kind: type[OSError]) -> int:
    """The code that makes Python raise this kind of `OSError`; EINVAL: whether it passes is not
    known."""
    codes = (errno.EACCES, errno.ENOENT, errno.EEXIST, errno.ETIMEDOUT, errno.ECONNRESET)
    return next((code for code in codes if type(OSError(code, "")) is kind), errno.EINVAL)


def passes(error: BaseException | None, *, worked: bool = False) -> bool:
    """Whether an error, or its cause, may pass by itself: the same call may succeed later.

    Args:
      error: from a disk or a store.
      worked: whether the same place could be used before. A store that then refuses the credentials
        (401, 403) has most often seen them expire, and they are renewed.
    """
    if error is None or type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
        return False  # jax's texts begin with the same words
    names, text = [kind.__name__ for kind in type(error).__mro__], str(error)
    quoted, code, status = _OS_CODE.search(text), _os_code(error), _http_status(error, text)
    return (
        any(word in name for name in names for word in _NAMES)
        or code in _CODES
        or status in _STATUSES
        or any(word in _error_name(error, text) for word in _EXPIRED)
        or (text.startswith(_TENSORSTORE) and not quoted)
        or (worked and status in _REFUSALS)
        or (worked and text.startswith(_TENSORSTORE_REFUSALS) and not quoted)
        or passes(error.__cause__, worked=worked)
    )


def _os_code(error: BaseException) -> int | None:
    """The operating system's code of an error, also of one that TensorStore or Arrow quotes."""
    quoted = _OS_CODE.search(str(error))
    return int(quoted[1]) if quoted else getattr(error, "errno", None)


def _http_status(error: BaseException, text: str) -> int | None:
    """The HTTP status of an error of botocore, aiohttp, gcsfs or TensorStore."""
    if quoted := _HTTP_STATUS.search(text):
        return int(quoted[1])
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    found = str(getattr(error, "status", None) or getattr(error, "code", None))
    return int(found) if found.isdecimal() else None


def _error_name(error: BaseException, text: str) -> str:
    """S3's name of an error, such as ExpiredToken; TensorStore quotes the answer in its text."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    quoted = re.search(r"<Code>(\w+)</Code>", text)
    return quoted[1] if quoted else ""


def describe(error: OSError, what: str, otherwise: str) -> str:
    """Return the sentence for the user: that `what` does not answer, or else `otherwise`."""
    if not passes(error):
        return otherwise
    return (
        f"{what} does not answer ({error.strerror}): see that this machine reaches it, and start "
        f"the same command again."
    )


def remedy_of(error: BaseException | None, place: str) -> str:
    """What to do about an error of writing to a place; "" where storage did not cause it.

    >>> remedy_of(OSError(errno.ENOSPC, "No space left on device"), "run.dir")
    'make room in run.dir'
    """
    if error is None:
        return ""
    if passes(error, worked=True):
        return f"see that this machine reaches {place}"
    code = _os_code(error)
    if code in _FULL:
        return f"make room in {place}"
    if code in _FORBIDDEN or _http_status(error, str(error)) in _REFUSALS:
        return f"make {place} writable"
    if isinstance(error, OSError) and not error.__cause__:
        return f"see that {place} can be written"
    return remedy_of(error.__cause__, place)


_failing: dict[str, float] = {}  # places that fail, and since when
_lock = threading.Lock()


def retry(
    call: Callable[[], Result],
    what: str,
    say: Callable[[str], None] | None = None,
    *,
    worked: bool = True,
) -> Result:
    """Return the result of a call, which is repeated while it fails with an error that passes.

    The first failure at a place is reported, and the first success after it. The error is raised
    when the place has not answered for `LIMIT` seconds, in this call or since earlier ones. The
    watchdog is told that this process is alive. A call must not wait for other processes, which do
    not repeat it.

    Args:
      call: what reads or writes.
      what: the disk or store, for the message.
      say: prints a sentence; None: to standard error.
      worked: see `passes`.
    """
    say, pause = say or _to_stderr, 0.1
    while True:
        started = time.monotonic()
        try:
            result = call()
        except Exception as error:
            if not passes(error, worked=worked):
                raise
            with _lock:
                is_new = what not in _failing
                since = _failing.setdefault(what, started)
            if time.monotonic() - since > LIMIT:
                raise
            if is_new:
                say(
                    f"warning: {what} does not answer ({reason_of(error)}): it is asked again, for "
                    f"{LIMIT:.0f} s at most"
                )
            wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            continue
        if _failing:
            with _lock:
                failed = _failing.pop(what, None)
            if failed is not None:
                say(f"{what} answers again, after {time.monotonic() - failed:.0f} s")
        return result


def is_over(what: str, started: float) -> bool:
    """Whether `LIMIT` has passed since a place stopped answering, or since `started` [s]."""
    return time.monotonic() - min(started, _failing.get(what, started)) > LIMIT


def wait(seconds: float) -> None:
    """Sleep, and let the watchdog know that this is a wait with a limit of its own."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        position.beat()
        time.sleep(min(left, _BEAT))


def reason_of(error: BaseException) -> str:
    """The reason in an error of a disk or store, in a few words."""
    quoted = re.search(r"([^:]+) \[os_error_code=", str(error))  # by TensorStore
    name = _error_name(error, str(error))
    if quoted:
        return quoted[1].strip()
    return getattr(error, "strerror", None) or name or first_line(error)


def _to_stderr(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
        print(sentence, file=sys.stderr, flush=True)
