"""Run a command: the one place where an error becomes a message and an exit code."""

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import IO

from jaxpipe.config import ConfigError, first_line, mask_secrets
from jaxpipe.core.schedule import ScheduleError
from jaxpipe.runtime import processes
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.storage.errors import passes


def run(
    command: Callable[[], int | None],
    failures: tuple[type[Exception], ...] = (),
    interrupted: str = "interrupted",
) -> int:
    """Run a command, in every process of it, and return its exit code, with a message if not 0.

    With several processes an error ends all of them. A reader of the output that is gone, such as
    `head`, ends the command without a message.

    Args:
      command: does the work; it returns an exit code, or None if it is done.
      failures: errors that mean that the result is no good (`ExitCode.FAILED`).
      interrupted: the message after Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of `jaxpipe/__init__.py`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _run(command, failures, interrupted)
    except BrokenPipeError:  # of the output: `_run` handles others
        return 128 + signal.SIGPIPE
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich ends with 1, as a failure does
            return 128 + signal.SIGPIPE
        raise
    finally:
        for output in (sys.stdout, sys.stderr):
            flush_or_drop(output)


def _has_lost_reader(output: IO[str]) -> bool:
    """Whether the output is a pipe whose other end is closed."""
    try:
        poll = select.poll()
        poll.register(output.fileno(), 0)
    except (OSError, ValueError):  # no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def flush_or_drop(output: IO[str]) -> None:
    """Flush an output, or redirect it to /dev/null if that fails.

    Otherwise Python's own flush at exit would fail and end the process with exit code 120.
    """
    try:
        output.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output.fileno())
        os.close(nowhere)


def _run(
    command: Callable[[], int | None], failures: tuple[type[Exception], ...], interrupted: str
) -> int:
    try:
        code = command() or ExitCode.DONE
        processes.finish()
        return code
    except KeyboardInterrupt:
        code, message = ExitCode.INTERRUPTED, interrupted
    except Exception as error:
        lost = any(map(_has_lost_reader, (sys.stdout, sys.stderr)))
        if isinstance(error, BrokenPipeError) and lost and not processes.several():
            raise  # not of another pipe or a socket
        code, message = code_of(error, failures), mask_secrets(str(error))
        if code == ExitCode.CRASH:
            print(mask_secrets(traceback.format_exc()), end="", file=sys.stderr)
            message = f"{type(error).__name__}: {first_line(error)}"
        elif code == ExitCode.OTHERS_GONE and not isinstance(error, processes.NotMetError):
            message = f"this process cannot go on without the others ({first_line(error)})"
    if processes.several():
        processes.leave(code, message)
    print("error: " * (code != ExitCode.INTERRUPTED) + message, file=sys.stderr)
    return code


def code_of(error: Exception, failures: tuple[type[Exception], ...] = ()) -> ExitCode:
    """The exit code of a command that an error ends."""
    if isinstance(error, failures):
        return ExitCode.FAILED
    if isinstance(error, processes.NotMetError):
        return ExitCode.OTHERS_GONE
    if isinstance(error, (ConfigError, ScheduleError)):
        return ExitCode.NO_ANSWER if passes(error) else ExitCode.BAD_INPUT
    own = ("INVALID_ARGUMENT", "callback")  # what this process does wrong itself
    if type(error).__name__ == "JaxRuntimeError" and processes.several():
        return ExitCode.CRASH if any(word in str(error) for word in own) else ExitCode.OTHERS_GONE
    return ExitCode.NO_ANSWER if passes(error) else ExitCode.CRASH
