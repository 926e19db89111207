"""Pieces of work given to processes, one after the other."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context
from typing import Any

from jaxpipe.config import ConfigError

Report = Callable[[Any], None]
Work = Callable[[Any, Report], Any]  # of a job; may report before it returns


class WorkerDied(Exception):
    """A process ended by itself."""


@contextmanager
def workers(count: int, work: Work, jobs: Iterator[Any]) -> Iterator[Iterator[tuple[bool, Any]]]:
    """What `work` says of all jobs, as it comes: (False, a report) or (True, a result).

    The processes end with this one, whatever ends it. Iterating raises `ConfigError` where a
    worker does, or cannot read or write a file, and `WorkerDied` where one is killed.
    """
    context = get_context("spawn")  # a fork of a process with threads may hang
    processes, lines = [], []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            lines.append(ours)
        yield _results(lines, jobs)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _results(lines: list[connection.Connection], jobs: Iterator[Any]) -> Iterator[tuple[bool, Any]]:
    """Feed every worker until there are no more jobs."""
    busy = [line for line in lines if _give(line, jobs)]
    while busy:
        for line in connection.wait(busy):
            try:
                said, value = line.recv()
            except EOFError as error:
                raise WorkerDied from error
            if said == "fault":
                raise ConfigError(value)
            yield said == "result", value
            if said == "result" and not _give(line, jobs):
                busy.remove(line)


def _give(line: connection.Connection, jobs: Iterator[Any]) -> bool:
    """Whether there was another job to give."""
    for job in jobs:
        line.send(job)
        return True
    return False


def _serve(line: connection.Connection, work: Work) -> None:
    """A worker: answers jobs until the process that gives them is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that began us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are what works in parallel here
    try:
        while True:
            job = line.recv()
            try:
                line.send(("result", work(job, lambda report: line.send(("report", report)))))
            except ConfigError as error:
                line.send(("fault", str(error)))
            except OSError as error:
                said = f"{error.filename or 'a file'} cannot be read or written: {error.strerror}."
                line.send(("fault", said))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
