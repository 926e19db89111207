"""What this process's threads wait for, from their Python stacks.

In a hang nearly all processes wait for the one that is stuck. Their stacks tell them apart: a
thread inside jax waits for devices, which may wait for those of another process; a thread inside
the coordination service waits for other processes; everything else is the process's own work.
"""

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import NamedTuple

OWN_WORK, DEVICES, PROCESSES = range(3)  # the smaller, the likelier it holds up the others


class Activity(NamedTuple):
    """What a process waits for (`OWN_WORK`, `DEVICES` or `PROCESSES`), and in which function.

    `compiles` is whether its main thread compiles, which may happen in any phase.
    """

    waits: int
    where: str
    compiles: bool = False


# Ends of the files of Python's library in which a thread waits for another thread of its process.
_THREADS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")
_PROCESSES = (
    "/jaxpipe/runtime/coordination.py",
    "/jaxpipe/checkpoint/orbax_port/save_barrier.py",
    "/multihost/multihost.py",  # Orbax's barriers
    "/futures/signaling_client.py",
)
_CALLBACKS = ("/jax/_src/callback.py", "/jax/_src/debugging.py")
_COMPILER = ("/jax/_src/compiler.py",)
_DEVICES = ("/jax/", "/jaxlib/")


def activity(main: int, stacks: Mapping[int, FrameType] | None = None) -> Activity:
    """What this process does that others may wait for.

    A host callback that runs counts as the process's own work, since devices wait for it. If the
    main thread waits for other threads, those that save a checkpoint are looked at in its place.

    Args:
      main: identifier of the thread that trains.
      stacks: innermost frame by thread; None: those of this process.
    """
    stacks = sys._current_frames() if stacks is None else stacks
    if any(_in(frame, _COMPILER) for frame in _outwards(stacks[main])):
        return Activity(OWN_WORK, _named(stacks[main]), compiles=True)
    for thread, innermost in stacks.items():
        if thread != main and any(_in(frame, _CALLBACKS) for frame in _outwards(innermost)):
            return Activity(OWN_WORK, _named(innermost))
    if not _waits_for_thread(stacks[main]):
        return Activity(_waits(stacks[main]), _named(stacks[main]))
    saving = [
        frame
        for thread, frame in stacks.items()
        if thread != main and not _waits_for_thread(frame) and _saves(frame)
    ]
    # A process that waits for others in one of these threads has finished its own share.
    frame = max(saving, key=_waits, default=stacks[main])
    return Activity(_waits(frame), _named(frame))


def _waits(innermost: FrameType) -> int:
    if _in(innermost, _PROCESSES):
        return PROCESSES
    return DEVICES if _in_jax(innermost) else OWN_WORK


def _waits_for_thread(innermost: FrameType) -> bool:
    return _in(innermost, _THREADS)


def _saves(innermost: FrameType) -> bool:
    return any("/orbax/" in frame.f_code.co_filename for frame in _outwards(innermost))


def _in(frame: FrameType, files: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.endswith(files)


def _in_jax(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in _DEVICES)


def _outwards(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame:
        yield frame
        frame = frame.f_back


def _named(innermost: FrameType) -> str:
    """The innermost function outside jax and Python's own waits, with its file and line."""
    callers = (f for f in _outwards(innermost) if not (_in(f, _THREADS) or _in_jax(f)))
    frame = next(callers, innermost)
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
