"""Lost time found in made-up recordings, whose slow part is known."""

from dataclasses import replace

import numpy as np
import pytest

from jaxpipe.core.schedule import Costs, Lockstep
from jaxpipe.core.schedule.lower import build_grid
from jaxpipe.core.schedule.placing import place_cells
from jaxpipe.core.schedule.scan import cell_starts, scan_waits
from jaxpipe.schedules import build
from jaxpipe.schedules.timing.lost_time import ALL, LINK, MeasuredScan, RankSeconds, cell_kind
from jaxpipe.schedules.timing.recording import Tick

P = 4
TWO_TICKS = Lockstep(transfer_ticks=2)


def replay_of(name="1f1b", lockstep=TWO_TICKS):
    schedule = build(name, pp=P, microbatches=8)
    return MeasuredScan(schedule, lockstep, build_grid(schedule, lockstep), Costs(1.0, 1.2, 0.9))


def recorded(replay, slow=(), by=1.0, link=None, replicas=1, unit=0.01):
    """Return the recorded times of ranks, and the time of a step of each replica.

    Cells of `slow = (rank, replica, ops)` take `by` times as long, with no ops all of that rank;
    the messages of the link (r, r + 1) take as long as an F.
    """
    found, takes = {}, []
    noise = np.random.default_rng(0)
    for replica in range(replicas):
        cells = np.array([[replay.planned.cell_time(c) for c in row] for row in replay.grid]) * unit
        for t, row in enumerate(replay.grid):
            for rank, cell in enumerate(row):
                ops = "+".join(action.op.name for action in cell.actions)
                if slow[:2] == (rank, replica) and slow[2:] in ((), (ops,)):
                    cells[t, rank] *= by
        cells *= noise.uniform(0.99, 1.01, cells.shape)
        transfer = np.full(P, 0.05 * unit)
        transfer[list(link or ())] = unit
        waits, meetings = scan_waits(
            replay.schedule, place_cells(replay.schedule, replay.lockstep), replay.lockstep
        )
        ticks = replay.lockstep.transfer_ticks
        starts = cell_starts(cells, waits, transfer, ticks, meetings)
        takes.append((starts[-1] + cells[-1]).max())
        begins = np.vstack([np.zeros(P), (starts + cells)[:-1]])
        # the later rank of a pair waits for the message alone
        exchange = np.maximum(starts - begins, transfer)
        for rank in range(P):
            made = [
                Tick(t, row[rank], b, b + e, b + e + c)
                for t, (row, b, e, c) in enumerate(
                    zip(replay.grid, begins[:, rank], exchange[:, rank], cells[:, rank])
                )
            ]
            found[rank, replica] = RankSeconds.of(made)
    return found, takes


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_slow_op_is_found_and_its_cost(name, replicas):
    replay = replay_of(name)
    op, place = ("W" if name == "zb_h1" else "F"), (2, replicas - 1)
    usual, (before, *_) = recorded(replay, replicas=replicas)
    slow, takes = recorded(replay, (*place, op), 1.5, replicas=replicas)
    first, *_ = replay.lost_times(slow)
    assert (first.pp_rank, first.replica, first.cause) == (*place, op)
    np.testing.assert_allclose(first.seconds, takes[-1] - before, rtol=0.2)
    assert all(each.seconds < 0.03 * before for each in replay.lost_times(usual))


def test_a_rank_that_is_slow_in_all_ops_is_found():
    replay = replay_of("zb_h1")
    found, _ = recorded(replay, (1, 0), 1.3)
    first, *_ = replay.lost_times(found)
    assert (first.pp_rank, first.cause) == (1, ALL)


def test_a_slow_link_is_found():
    replay = replay_of()
    found, _ = recorded(replay, link=(1, 2))
    first, *_ = replay.lost_times(found)
    assert (first.pp_rank, first.cause) == (1, LINK)


def test_permutes_that_synchronize_all_show_no_link():
    replay = replay_of(lockstep=Lockstep(synchronizes_all=True))
    found, _ = recorded(replay, link=(1, 2))
    assert LINK not in {each.cause for each in replay.lost_times(found)}


def test_a_late_start_costs_what_others_wait_for_it():
    replay = replay_of(lockstep=Lockstep(synchronizes_all=True))
    np.testing.assert_allclose(replay.late_start(3, 0.02, 1.0), 0.02)
    free = replace(replay, lockstep=TWO_TICKS)  # the last rank has nothing to do at first
    np.testing.assert_allclose(free.late_start(0, 0.02, 1.0), 0.02)
    assert free.late_start(3, 0.02, 1.0) == 0


def test_kinds_of_cells():
    kinds = {cell_kind(cell) for row in replay_of("interleaved_1f1b").grid for cell in row}
    assert {"", "F@0", "F@7", "BW@3"} <= kinds
