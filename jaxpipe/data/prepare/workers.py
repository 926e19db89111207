"""A pool of worker processes that stream reports and results."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context
from typing import Any

from jaxpipe.config import ConfigError

Report = Callable[[Any], None]
Work = Callable[[Any, Report], Any]  # called with a job; may report before it returns the result


class WorkerDiedError(Exception):
    """A worker process ended unexpectedly."""


@contextmanager
def run_workers(
    count: int, work: Work, jobs: Iterator[Any]
) -> Iterator[Iterator[tuple[bool, Any]]]:
    """Run `work` on all jobs in `count` processes; yields an iterator of their messages.

    A message is (False, report) or (True, result), in order of arrival. The workers end when this
    process ends for any reason. Iterating raises `ConfigError` where a worker raises it or cannot
    read or write a file, and `WorkerDiedError` where a worker is killed.
    """
    context = get_context("spawn")  # a fork of a process with threads may hang
    processes, lines = [], []
    try:
        for _ in range(count):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_run_jobs, args=(child_end, work), daemon=True)
            process.start()
            child_end.close()
            processes.append(process)
            lines.append(parent_end)
        yield _iterate_results(lines, jobs)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _iterate_results(
    lines: list[connection.Connection], jobs: Iterator[Any]
) -> Iterator[tuple[bool, Any]]:
    """Keep all workers busy until there are no more jobs."""
    busy = [line for line in lines if _send_job(line, jobs)]
    while busy:
        ready = connection.wait(busy)
        for line in [line for line in busy if line in ready]:
            try:
                kind, value = line.recv()
            except EOFError as error:
                raise WorkerDiedError(
                    "a worker was killed, perhaps for lack of memory: the same command goes on, "
                    "also with fewer --workers"
                ) from error
            if kind == "fault":
                raise ConfigError(value)
            yield kind == "result", value
            if kind == "result" and not _send_job(line, jobs):
                busy.remove(line)


def _send_job(line: connection.Connection, jobs: Iterator[Any]) -> bool:
    """Send the next job, and return whether there was one."""
    for job in jobs:
        line.send(job)
        return True
    return False


def _run_jobs(line: connection.Connection, work: Work) -> None:
    """Run jobs in a worker process until the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use all cores
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
