"""A save counts as hung when no byte moves within the limit, however slow it is."""

import pytest

from jaxpipe.checkpoint.movement import movement_of
from jaxpipe.runtime import position, watchdog
from jaxpipe.runtime.watchdog import Watchdog

LIMIT = 600  # of a save [s], where `runtime.hang_timeout` is auto


class Clock:
    """A stand-in for `time`, whose `now` a test sets."""

    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (position, watchdog):
        monkeypatch.setattr(module, "time", clock)
    for name in ("now", "moved", "finished"):  # which the test changes
        monkeypatch.setattr(position, name, getattr(position, name))
    position.moved = -float("inf")
    return clock


def longest_idle(clock, file, seconds, every):
    """The longest time without progress that the watchdog sees in a save that writes now and then.

    A byte is written every `every` seconds; 0: never.
    """
    dog, worst = Watchdog("auto"), 0.0
    unfinished = file.parent.parent.parent
    position.enter("save", 4)
    with position.metered(movement_of(unfinished, 0)):
        for second in range(1, seconds):
            clock.now += 1
            if every and second % every == 0:
                with file.open("ab") as opened:
                    opened.write(b"x")
            dog._measure()
            worst = max(worst, clock.now - max(position.now.since, position.moved))
    return worst


@pytest.fixture
def file(tmp_path):
    folder = tmp_path / "4.orbax-checkpoint-tmp" / "state"
    folder.mkdir(parents=True)
    return folder / "array"


@pytest.mark.parametrize("every", [1, 60, 500])
def test_a_save_that_moves_a_byte_now_and_then_is_no_hang(clock, file, every):
    assert longest_idle(clock, file, 2000, every) <= LIMIT


def test_a_save_that_moves_nothing_is_a_hang_in_the_limit(clock, file):
    file.write_bytes(b"some bytes of before")
    assert longest_idle(clock, file, LIMIT + 10, 0) > LIMIT


def test_files_of_other_processes_are_not_looked_at(tmp_path):
    folders = [tmp_path / "4.orbax-checkpoint-tmp" / f"ocdbt.process_{i}" for i in (0, 1)]
    for folder in folders:
        folder.mkdir(parents=True)
    measure = movement_of(tmp_path, 0)
    before = measure()
    (folders[1] / "a").write_bytes(b"x")
    assert measure() == before
    (folders[0] / "a").write_bytes(b"x")
    assert measure() != before
