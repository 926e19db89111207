"""Schedules through files: read back equal, and every fault named by file and cell."""

import pytest
from orders import build, near

from jaxpipe.core.schedule import ORDERS, ScheduleError, read_schedule, write_schedule
from jaxpipe.core.schedule.orders.custom import build_custom


@pytest.mark.parametrize("suffix", [".csv", ".json"])
@pytest.mark.parametrize("name", ORDERS)
def test_round_trip(tmp_path, name, suffix):
    schedule = near(name, 4, 8)
    write_schedule(schedule, tmp_path / f"{name}{suffix}")
    again = read_schedule(tmp_path / f"{name}{suffix}")
    assert again.ranks == schedule.ranks
    assert again.placement == schedule.placement
    assert again.microbatches == schedule.microbatches


def test_slices_are_given_beside_the_file(tmp_path):
    schedule = build("1f1b", pp=2, microbatches=3, slices=2)
    write_schedule(schedule, tmp_path / "1f1b.csv")
    assert read_schedule(tmp_path / "1f1b.csv", slices=2) == schedule
    assert build_custom(2, 3, slices=2, path=tmp_path / "1f1b.csv") == schedule
    with pytest.raises(ScheduleError, match="go forward in order, and back in reverse"):
        read_schedule(tmp_path / "1f1b.csv", slices=3)
    with pytest.raises(ScheduleError, match=r"is for pp=2 and microbatches=3 of 2 slices, not for"):
        build_custom(2, 4, slices=2, path=tmp_path / "1f1b.csv")


def test_idle_cells_are_passed_over(tmp_path):
    path = tmp_path / "gaps.csv"
    path.write_text("0F0,,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,,\n")
    assert read_schedule(path).notation() == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a row for each rank, and has none"),
        ("0F0,0X0\n", "rank 0, cell 1: '0X0' is no action: write stage, F, I, W or B"),
        ("(0B0;0F0)OVERLAP_F_B\n", "rank 0, cell 0: .* must pair an F with an I, W or B"),
        ("0B0\n", "holds no forward action"),
        ("0F0,0B0,2F0,2B0\n", "1F0 is missing: each of the stages up to 2 needs its forwards"),
        ("0F0,0F9999999999,0B0\n", "0F1 is missing: .* of the microbatches up to 9999999999"),
        ("0F0,0B0,9999999999F0\n", "1F0 is missing: each of the stages up to 9999999999 "),
        ("0F0,0F1,0B0\n", "stage 0, microbatch 1 has F1@0: it needs F and then BW"),
        ("0F0,0F0,0B0\n", "F0@0 appears 2 times"),
        ("0F0,0B0\n1F0,1B0,0F1,0B1\n", "1F1 is missing"),
        ("0F0,0B0\n1B0,1F0\n", r"rank 1 waits at BW0@1 \(position 0\) for F0@1 of the same rank"),
    ],
)
def test_faults_are_named(tmp_path, text, message):
    path = tmp_path / "custom.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message) as caught:
        read_schedule(path)
    assert "custom.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edits", "cause"),
    [
        # Rank 3 computes a gradient before its forward; all others wait for that one.
        ({3: ("3F0,3B0,3F1", "3F1,3B0,3F0")},
         "deadlock: rank 3 waits at BW0@3 (position 1) for F0@3 of the same rank (position 2), "
         "which it runs later"),
        ({2: ("2F0,2F1", "2B0,2F0,2F1")},
         "deadlock: rank 2 waits at BW0@2 (position 0) for F0@2 of the same rank (position 1)"),
        # Rank 1 waits for rank 2 at once, which waits for rank 1: ranks 0 and 3 are innocent.
        ({1: ("1F0,1F1,1F2,1B0", "1F0,1B0,1F1,1F2"), 2: ("2F0,2F1,2B0", "2F0,2F1,2B0")},
         "deadlock: rank 1 waits at BW0@1 (position 1) for BW0@2 of rank 2 (position 2), which "
         "waits at F1@2 (position 1) for F1@1 of rank 1 (position 2): none of them can go on."),
    ],
)  # fmt: skip
def test_a_deadlock_names_its_cause(tmp_path, edits, cause):
    path = tmp_path / "stuck.csv"
    write_schedule(build("1f1b", pp=4, microbatches=4), path)
    rows = path.read_text().splitlines()
    for rank, (before, after) in edits.items():
        assert before in rows[rank]
        rows[rank] = rows[rank].replace(before + ",", after + ",")
        for cell in set(before.split(",")) ^ set(after.split(",")):
            rows[rank] = rows[rank][::-1].replace(f"{cell},"[::-1], "", 1)[::-1]
    path.write_text("\n".join(rows) + "\n\n")
    with pytest.raises(ScheduleError) as caught:
        build_custom(4, 4, path=path)
    assert cause in str(caught.value)


def test_a_file_for_another_number_of_ranks(tmp_path):
    path = tmp_path / "mine.csv"
    write_schedule(build("1f1b", pp=4, microbatches=4), path)
    for more in ("4F0\n", "4F0,4F1,4F2,4F3\n", "4B0\n"):
        (tmp_path / "five.csv").write_text(path.read_text() + more)
        with pytest.raises(ScheduleError, match=r"orders of 5 pipeline ranks.* but pp=4"):
            build_custom(4, 4, path=tmp_path / "five.csv")
    with pytest.raises(ScheduleError, match=r"orders of 4 pipeline ranks.* but pp=2"):
        build_custom(2, 4, path=path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ScheduleError, match="none.csv: cannot be read"):
        read_schedule(tmp_path / "none.csv")
    (tmp_path / "half.json").write_text('[["0F0"')
    with pytest.raises(ScheduleError, match="half.json: is not valid json"):
        read_schedule(tmp_path / "half.json")


def test_build_takes_a_file(tmp_path):
    path = tmp_path / "mine.csv"
    write_schedule(build("zb_h1", pp=2, microbatches=4), path)
    assert build_custom(2, 4, path=path).notation()[1][0] == "1F0"
    with pytest.raises(
        ScheduleError, match="is for pp=2 and microbatches=4, not for pp=2 and micr"
    ):
        build_custom(2, 8, path=path)
    with pytest.raises(ScheduleError, match="custom needs a path: give the .csv or .json"):
        build_custom(2, 8)
