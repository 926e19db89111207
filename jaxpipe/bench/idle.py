"""`bench idle`: how long no device has worked while a run was recorded: what waits for the host.

Of a run's own recording (`log.profile_start`, in `<run.dir>/profile`). Ranks idle in a pipeline
while others work: that is the bubble, which `jaxpipe.profile` shows. When all of them idle, they
wait for the host, between two steps as a rule.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from jaxpipe.bench.processes import BenchError
from jaxpipe.training.bubble import events_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("recording", type=Path, help="a folder with one process's recording")


def run(arguments: argparse.Namespace) -> None:
    """Print the share; raises `BenchError` where nothing is recorded."""
    found = sorted(arguments.recording.rglob("*.trace.json.gz"))
    if len(found) != 1:
        raise BenchError(
            f"{arguments.recording} has {len(found)} recordings (*.trace.json.gz): name the folder "
            f"of one, such as runs/NAME/profile/process-0."
        )
    busy = [(event.begin, event.end) for event in events_of(found[0])]
    if not busy:
        raise BenchError(f"{found[0]} has no operation of a device: record steps of a run.")
    seconds, stretches = max(end for _, end in busy) - min(begin for begin, _ in busy), idle(busy)
    print(
        f"{seconds:.3f} s recorded; no device worked in {sum(stretches) / seconds:.2%} of it; "
        f"longest {max(stretches, default=0) * 1e3:.2f} ms"
    )


def idle(busy: Iterable[tuple[float, float]]) -> list[float]:
    """Lengths of the stretches between the first begin and the last end that none covers.

    >>> idle([(0.0, 1.0), (0.5, 2.0), (2.5, 3.0), (1.0, 1.5)])
    [0.5]
    """
    stretches, until = [], None
    for begin, end in sorted(busy):
        if until is not None and begin > until:
            stretches.append(begin - until)
        until = end if until is None else max(until, end)
    return stretches
