"""The meaning of `parallel.memory_limit`: bytes of the configuration's own microbatches."""

from pathlib import Path

import pytest
from legal import QUICK
from resolving import resolved

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.core.schedule import MemoryCosts, Op, ScheduleError, peak_memory
from jaxpipe.plan import main
from jaxpipe.planning import arrange, rank_bytes
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.limits import activation_limit_of
from jaxpipe.runtime.devices import DEVICES
from jaxpipe.schedules import FAMILIES, build

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
SEVENTY = Path(__file__).parents[2] / "configs" / "llama3_70b_plan.toml"
SEARCHED = [name for name, family in FAMILIES.items() if family.is_searched]
H100 = DEVICES["H100"].memory
GIB = 2**30


def seventy(*overrides):
    sizes = ("parallel.pp=4", "parallel.dp=1", "train.grad_accum_steps=16")
    return configs.load(SEVENTY, [*sizes, *overrides])


def of_a_stage(plan):
    """Return the bytes of a microbatch in the largest stage from F to B, and from B to W."""
    layer = costs_of(plan.config).kinds["layer"]
    most = max(plan.layers)
    return most * (layer.for_b + layer.for_w), most * (layer.for_w + layer.stash)


def most_held(plan, until_b, until_w):
    """Return the peak bytes of any rank, in the order in which cells run."""
    change = {Op.F: until_b, Op.B: until_w - until_b, Op.W: -until_w, Op.BW: -until_b}
    most = 0
    for order in plan.schedule.ranks:
        held = 0
        for action in (action for cell in order for action in cell.actions):
            held += change[action.op]
            most = max(most, held)
    return most


@pytest.mark.slow(unless=["*-40GiB"])
@pytest.mark.parametrize("limit", ["1p", "2p", 9.0, "40GiB", "auto"])
@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("remat", ["selective", "full"])
def test_seventy_billion_parameters_stay_within_a_limit(name, limit, remat):
    """With these layers, W's residuals take more bytes than B's, by 77 % and 460 %."""
    config = seventy(
        f"parallel.schedule={name}", f"parallel.memory_limit={limit}", f"train.remat={remat}"
    )
    if (name, limit, remat) == ("zb_auto", "1p", "full"):
        with pytest.raises(ScheduleError, match=r"4 is less than one .* takes on a rank, 5.59375"):
            arrange(config, effort=QUICK)
        return
    plan = arrange(config, effort=QUICK)
    until_b, until_w = of_a_stage(plan)
    assert until_w / until_b == pytest.approx(1.771 if remat == "selective" else 5.594, abs=1e-3)
    allowed = {
        "1p": plan.schedule.stages * until_b,
        "2p": 2 * plan.schedule.stages * until_b,
        9.0: 9 * until_b,
        "40GiB": 40 * GIB,
        "auto": H100 * 0.92 - rank_bytes(plan.config, plan.layout, None).total,
    }
    held = most_held(plan, until_b, until_w)
    assert held <= allowed[limit] * (1 + 1e-9)
    # The limit is used, but by 1F1B, which may be as fast: its BW recomputes once.
    assert held > allowed[limit] / 2 or not plan.schedule.splits_gradients


def test_others_are_refused_where_w_keeps_too_much():
    """On ZB-H1 P microbatches are live, on the last rank partly those that wait for W."""
    for limit, fits in (("1p", False), ("59GiB", True), ("58GiB", False)):
        config = seventy("parallel.schedule=zb_h1", f"parallel.memory_limit={limit}")
        if fits:
            plan = arrange(config)
            assert 58 * GIB < most_held(plan, *of_a_stage(plan)) < 59 * GIB
        else:
            with pytest.raises(ScheduleError, match="the least that works for it is 7.08"):
                arrange(config)


def test_running_ahead_is_counted():
    run = ("parallel.pp=4", "parallel.dp=1", "train.grad_accum_steps=8", "parallel.memory_limit=4")
    assert arrange(configs.load(SMALL, run)).schedule.name == "1f1b"
    with pytest.raises(ScheduleError, match="holds up to 7 on a rank, more than memory_limit=4.0"):
        arrange(configs.load(SMALL, [*run, "parallel.in_flight=7"]))


def test_slices_keep_keys_values_and_their_gradients():
    """Live from a sequence's first F to its last B; the gradient from its first B."""
    sequences, slices = 3, 4
    schedule = build("1f1b", pp=2, microbatches=sequences, slices=slices)
    peaks = []
    for order in schedule.ranks:
        forward, back = set(), set()
        most = 0
        for op, _, m in (action for cell in order for action in cell.actions):
            (forward if op is Op.F else back).add(m)
            started = lambda seen: {i // slices for i in seen}  # noqa: E731
            ended = {i for i in range(sequences) if {*range(4 * i, 4 * i + 4)} <= back - {m}}
            states = len(started(forward) - ended) + len(started(back) - ended)
            most = max(most, len(forward) - len(back) + 0.5 * states)
        peaks.append(most)
    assert peak_memory(schedule, MemoryCosts(state=0.5)) == peaks
    config = configs.load(
        SMALL, ["parallel.pp=2", "parallel.dp=1", "parallel.slices=4", "parallel.memory_limit=5"]
    )
    with pytest.raises(ScheduleError, match=r"1f1b holds up to 6\.45455 on a rank"):
        arrange(config)


def test_deferred_ends_are_kept_too():
    sizes = (
        "parallel.pp=2",
        "parallel.dp=1",
        "train.grad_accum_steps=8",
        "parallel.memory_limit=9",
    )
    units = []
    for more in ((), ("parallel.defer_embed_head=true",)):
        config = configs.load(SMALL, [*sizes, *more])
        room = activation_limit_of(config, arrange(config).layout, None)
        units.append(room.unit)
    logits, message = 32 * 256 * 4, costs_of(config).message
    assert units[1] - units[0] == logits + message


@pytest.mark.parametrize(
    ("limit", "memory", "message"),
    [
        ("3", None, "use '1p', '2p', a number of microbatches, bytes such as 40GiB, or 'auto'"),
        ("many GiB", None, "memory_limit='many GiB': use '1p'"),
        ("20KiB", None, "there 1 is what a stage keeps of a microbatch, .* KiB, and .*='20KiB' is"),
        ("auto", None, "'auto' needs a device whose memory is known, and this one's is not: give"),
        ("auto", 1e5, "'auto' leaves nothing: parameters, gradients, moments and the head take"),
    ],
)
def test_limits_that_are_none(limit, memory, message):
    config = configs.load(
        SMALL, ["parallel.pp=2", "parallel.dp=1", "parallel.schedule=zb_auto",
                f"parallel.memory_limit='{limit}'"],
    )  # fmt: skip
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(config, platform="cpu", memory=memory)
    assert "\n" not in str(caught.value)


@pytest.mark.extended
def test_auto_waits_until_the_devices_are_known(capsys):
    how = ["parallel.pp=2", "parallel.dp=1", "parallel.memory_limit=auto"]
    resolved(configs.load(SMALL, how))
    assert main([str(SMALL), *how, "--memory", "80GiB"]) == 0
    assert "1f1b auto *" in capsys.readouterr().out
