"""Who holds up a run, decided from what all processes report."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from jaxpipe.checkpoint.orbax_port import save_barrier
from jaxpipe.runtime import position
from jaxpipe.runtime.activity import DEVICES, OWN_WORK, PROCESSES, activity
from jaxpipe.runtime.hang_cause import Report, verdict
from jaxpipe.runtime.position import PHASES


def report(process, number=40, waits=DEVICES, **other):
    """Return the report of a process that waits for its devices in step 7 and is overdue."""
    values = {"phase": "step", "step": 7, "age": 70.0, "limit": 60.0, "finished": 6} | other
    return Report(
        process=process, started="now", beat=9, written="now", host=f"host{process}", pid=1,
        number=number, waits=waits, where="f (x.py:1)", **values,
    )  # fmt: skip


def behind(*reports, silent=(), count=None):
    found = verdict(reports, dict.fromkeys(silent, 9.0), count or len(reports))
    return None if found is None else found.behind


@pytest.mark.parametrize("stuck", range(4))
@pytest.mark.parametrize(
    "differs",
    [
        {"number": 38, "phase": "data"},
        {"number": 39},
        {"waits": OWN_WORK},
        {"waits": OWN_WORK, "number": 41},  # the others may be blocked while they dispatch a step
        {"waits": OWN_WORK, "number": 38, "phase": "save"},
    ],
)
def test_the_one_that_differs_is_named(stuck, differs):
    reports = [report(index, **(differs if index == stuck else {})) for index in range(4)]
    assert behind(*reports) == (stuck,)
    assert f"process {stuck} (pid 1 on host{stuck})" in verdict(reports, {}, 4).sentence


@pytest.mark.parametrize("stuck", range(3))
def test_one_that_waits_for_devices_holds_up_those_that_wait_for_processes(stuck):
    """As while a program is compiled, which the others have compiled already."""
    waits = [DEVICES if index == stuck else PROCESSES for index in range(3)]
    assert behind(*map(report, range(3), [40] * 3, waits)) == (stuck,)


def test_several_may_be_named():
    lost = [report(0), report(1, 38), report(2), report(3, 38)]
    assert behind(*lost) == (1, 3)
    assert behind(report(0), report(1, 38, OWN_WORK), report(2, 39, OWN_WORK)) == (1,)
    many = [report(index, 40 if index == 9 else 38) for index in range(10)]
    assert "and 5 more processes" in verdict(many, {}, 10).sentence


def test_a_silent_process_comes_first():
    reports = [report(0, waits=OWN_WORK), report(1), report(2, 41)]
    assert behind(*reports, silent=[2]) == (2,)
    assert behind(*reports, silent=[1, 2]) == (1, 2)
    assert behind(*reports[:2], silent=[2], count=3) == (2,)
    assert "process 2 has never reported" in verdict(reports[:2], {2: 9.0}, 3).sentence


def test_a_process_without_network_comes_next():
    """Both wait for each other's messages; a late answer now and then is no lost network."""
    apart = report(1, waits=OWN_WORK, unanswered=31.0)
    assert behind(report(0, 38), apart, report(2, unanswered=29.0)) == (1,)
    assert behind(report(0), apart, report(2), silent=[2]) == (2,)
    assert "not reached process 0 over the network" in verdict([report(0), apart], {}, 2).sentence


def test_nobody_is_named_where_all_are_alike():
    assert behind(*map(report, range(4))) == ()
    assert behind(*(report(index, waits=OWN_WORK, phase="data") for index in range(4))) == ()
    assert behind(report(0)) == (0,)  # alone


@pytest.mark.parametrize("phase", ["compile", "save", "restore"])
def test_a_phase_has_its_own_limit(phase):
    """Those that wait for it are overdue; it is not."""
    slow = report(1, 38, OWN_WORK, phase=phase, limit=600.0)
    assert behind(report(0), slow, report(2)) is None
    late = report(1, 38, OWN_WORK, phase=phase, limit=60.0)
    assert behind(report(0), late, report(2)) == (1,)
    assert behind(report(0), report(1, age=59.0)) is None


def test_one_whose_run_is_over_holds_up_nobody():
    ended = report(0, 50, PROCESSES, over=True)
    assert behind(ended, report(1, phase="save")) == (1,)
    assert behind(ended, report(1, age=1.0)) is None
    assert behind(ended) is None


def test_the_limit_follows_the_median_step():
    position.restart()
    assert position.limit("auto", "step") == 600  # before the first step is over
    for step, seconds in enumerate([200.0, 1.0, 2.0], start=1):
        position.finish(step, seconds)
    assert position.limit("auto", "step") == 60
    for step in range(4, 40):
        position.finish(step, 30.0)
    assert position.limit("auto", "data") == 150
    assert position.limit("auto", "save") == 600
    assert position.limit(5.0, "data") == position.limit(5.0, "save") == 5
    for phase in ("open", "restore", "score", "export"):  # where bytes flow: of no progress
        assert position.limit(5.0, phase) == position.limit("auto", phase) == 600
    for phase in ("import", "devices", "trace", "compile"):
        assert position.limit(5.0, phase) == position.limit("auto", phase) == 1800
    for phase in ("restore", "compile"):
        assert position.limit(4000.0, phase) == 4000


def test_phases_are_counted():
    position.restart()
    position.enter("data", 3)
    position.enter("step")
    assert position.now[:3] == ("step", 3, 2)
    position.finish(3, 1.0)
    assert position.finished.step == 3
    assert position.now.phase in PHASES


def test_the_time_of_a_start_is_counted_by_phase(monkeypatch):
    """From the command on, phases that come again added up, until a new run begins."""
    clock = iter([10.0, 11.0, 13.0, 14.0, 18.0, 20.0, 21.0])
    monkeypatch.setattr(position, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    position.enter("save")
    position.restart()
    for phase in ("plan", "import", "plan"):
        position.enter(phase)
    assert position.seconds_by_phase() == {"import": 6.0, "plan": 3.0}
    position.restart()
    assert not position.spent


def test_the_first_run_of_a_process_begins_with_the_process():
    code = "from jaxpipe.runtime import position; position.restart(); print(position.now.since)"
    begin = time.monotonic()
    since = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert begin - 0.1 < float(since) < time.monotonic() - 0.01


def stack(*files):
    """Return the innermost frame of a thread with functions in these files, outermost first."""
    frame = None
    for file in files:
        code = SimpleNamespace(co_filename=file, co_name=file.rpartition("/")[2])
        frame = SimpleNamespace(f_code=code, f_lineno=1, f_back=frame)
    return frame


LOOP, DATA = "/x/jaxpipe/run/loop.py", "/x/jaxpipe/data/prepare/readers.py"
ARRAY, CALLBACK = "/lib/jax/_src/array.py", "/lib/jax/_src/callback.py"
SERVICE, BARRIER = "/x/jaxpipe/runtime/coordination.py", "/lib/orbax/x/multihost/multihost.py"
SAVE_BARRIER = save_barrier.__file__
LOCK, SAVE = "/python/threading.py", "/lib/orbax/checkpointer.py"


@pytest.mark.parametrize(
    ("main", "others", "waits", "where"),
    [
        ([LOOP, ARRAY], [], DEVICES, LOOP),
        ([LOOP, SERVICE], [], PROCESSES, SERVICE),
        ([LOOP, DATA], [], OWN_WORK, DATA),
        ([LOOP, DATA, LOCK], [[SERVICE]], OWN_WORK, DATA),  # a thread that reads data is stuck
        ([LOOP, ARRAY], [[ARRAY, CALLBACK, DATA]], OWN_WORK, DATA),
        ([LOOP, ARRAY], [[SAVE, "/python/selectors.py"]], DEVICES, LOOP),
        ([LOOP, SAVE, LOCK], [[SAVE, BARRIER], [SAVE, LOCK]], PROCESSES, BARRIER),
        ([LOOP, SAVE, LOCK], [[SAVE, "/python/x.py"], [SAVE, BARRIER]], PROCESSES, BARRIER),
        ([LOOP, SAVE, LOCK], [[SAVE, SAVE_BARRIER]], PROCESSES, SAVE_BARRIER),
        ([LOOP, SAVE, LOCK], [[SAVE, "/python/selectors.py"]], OWN_WORK, "/python/selectors.py"),
        ([LOOP, SAVE, LOCK], [[LOCK], [DATA]], OWN_WORK, SAVE),
    ],
)
def test_stacks_say_what_a_process_waits_for(main, others, waits, where):
    stacks = dict(enumerate([stack(*main), *(stack(*other) for other in others)]))
    found = activity(0, stacks)
    assert found.waits == waits
    assert found.where.endswith(f"({where}:1)")


def test_compiling_is_noticed_in_any_phase():
    """As for a small function that is first called after step 1."""
    compiles = activity(0, {0: stack(LOOP, "/lib/jax/_src/compiler.py", "/lib/jax/_src/x.py")})
    assert compiles == (OWN_WORK, f"loop.py ({LOOP}:1)", True)
    assert not activity(0, {0: stack(LOOP, ARRAY)}).compiles


def test_a_host_callback_is_own_work_of_its_process():
    import jax

    entered, go = threading.Event(), threading.Event()

    def stuck(_):
        entered.set()
        go.wait(20)

    def run():
        jax.block_until_ready(jax.jit(lambda x: jax.debug.callback(stuck, x))(1.0))
        jax.effects_barrier()

    main = threading.Thread(target=run, daemon=True)
    main.start()
    assert entered.wait(20)
    found = activity(main.ident)
    go.set()
    main.join(20)
    assert found.waits == OWN_WORK
    assert "stuck (" in found.where
