"""A run whose data cannot be read any more stops where all processes agree, with what it has."""

import errno
import itertools

import pytest

from jaxpipe.config import ConfigError
from jaxpipe.data.read_ahead import PROGRAMS, ReadAhead, failure_of


def batches(end):
    for number in itertools.count():
        if number == end:
            raise ConfigError("gone") from OSError(errno.ESTALE, "stale")
        yield number


def test_what_is_needed_to_stop_together_is_in_hand_when_a_read_fails():
    """A process may have to take part in two more programs, of several steps (`Watch.reached`)."""
    ahead, taken = ReadAhead(batches(50), PROGRAMS * 3), []
    while not failure_of(ahead, 1000):
        taken.append(next(ahead))
    left = list(itertools.islice(ahead, 50 - len(taken)))
    assert taken + left == list(range(50))
    assert len(left) >= 3 * 3
    with pytest.raises(ConfigError):
        next(ahead)


def test_a_batch_that_the_run_does_not_need_may_fail():
    ahead = ReadAhead(batches(5), PROGRAMS)
    for number in range(5):
        assert next(ahead) == number
        assert failure_of(ahead, 4 - number) is None
    assert failure_of(ahead, 1)


def test_other_iterators_never_fail():
    assert failure_of(iter([]), 5) is None
