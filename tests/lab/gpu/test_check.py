"""`plan --check-gpu`: the real step compiled for H100s that are not present."""

import importlib.util
import json
import re
from dataclasses import fields
from types import SimpleNamespace

import jax
import pytest
from compiling import HAS_COMPILER, HAS_CUDNN, LLAMA, SMALL, needs_compiler, plan, report

from jaxpipe.config import load
from jaxpipe.lab.gpu import cards, check
from jaxpipe.plan import main
from jaxpipe.planning import Devices, resolve
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.runtime.devices import DEVICES
from jaxpipe.runtime.environment import usable_share
from jaxpipe.runtime.programs.compiler import of_purpose
from jaxpipe.training.trainer import Trainer

STEP = ("model.n_layers=8", "train.grad_accum_steps=8", "train.compute_dtype=bfloat16",
        "train.seq_len=128", "model.d_model=128", "model.d_ff=256")  # fmt: skip
VECTOR = 4 * 128  # bytes: a norm's gain, which may be copied


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this XLA copies what conds pass on")
@pytest.mark.parametrize(
    ("schedule", "pp", "dp"),
    [("1f1b", 4, 2), ("zb_h1", 4, 2), ("zbv", 4, 8), ("dualpipe", 4, 2)],
)
def test_the_step_on_many_gpus(schedule, pp, dp):
    found = report(
        *STEP, f"parallel.pp={pp}", f"parallel.dp={dp}", f"parallel.schedule={schedule}",
        "parallel.layer_split=even", *["parallel.transfer_ticks=2"] * (schedule != "1f1b"),
    )  # fmt: skip
    assert found["topology"] == ("1x1x8" if pp * dp == 8 else "1x4x8")
    permutes = found["permutes"]
    assert permutes["conditionals"] > 0
    if schedule == "1f1b":  # phased permutes, each in its own branch
        assert (permutes["synchronous"], permutes["asynchronous"]) == (
            permutes["permute_phases"],
            0,
        )
        assert permutes["permute_phases"] == 2
    else:
        assert permutes["synchronous"] == 0
        assert permutes["asynchronous"] == 2
        assert permutes["hides"] == [permutes["conditionals"]] * 2
        assert permutes["hidden"]
    copied = [copy for copy in found["buffer_copies"] if copy["size"] > VECTOR]
    assert copied == []
    assert found["graphs"]["whole"]
    assert found["graphs"]["stops"] == 0
    assert found["custom_calls"]["__cublas$lt$matmul"] >= 8 // pp * (7 + 14)
    largest = found["temporaries"]
    assert [one["size"] for one in largest] == sorted((o["size"] for o in largest), reverse=True)
    assert all(one["line"].startswith("jaxpipe/") for one in largest[:4])
    seconds = found["seconds"]
    assert {"BW", "B"} & set(seconds["actions"])
    assert 0 < seconds["actions"]["F"] < seconds["step"]
    assert seconds["step_by_plan"] > 0
    assert found["dropped_options"] == []
    size = found["bytes"]
    assert size["aliased"] > 0.99 * size["outputs"]  # the state is updated in place
    everything = size["arguments"] + size["temporaries"] + size["outputs"] - size["aliased"]
    assert 0.95 * everything < size["peak"] <= everything  # not everything is live at once


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this XLA copies what conds pass on")
def test_steps_in_one_program_are_compiled_as_they_run():
    """Three more conditionals in a tick: sums restart, a step is complete, a step is validated."""
    one, several = (
        report(
            *STEP, "parallel.pp=4", "parallel.dp=2", "parallel.schedule=zb_h2",
            "parallel.layer_split=even", "parallel.transfer_ticks=2", "train.eval_every=0",
            "parallel.vocab_parallel_pp=false", f"train.fused_steps={steps}",
            "model.vocab_size=512",
        )
        for steps in (1, 2)
    )  # fmt: skip
    permutes, few = several["permutes"], one["permutes"]["conditionals"]
    assert permutes["conditionals"] == few + 3
    assert (permutes["asynchronous"], permutes["synchronous"]) == (2, 0)
    assert min(permutes["hides"]) >= few
    assert several["graphs"]["whole"]
    embedding = "f32[512,128]"
    assert embedding not in {copy["shape"] for copy in several["buffer_copies"]}


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this XLA copies what conds pass on")
@pytest.mark.parametrize("shared", ["false", "true"])
def test_the_step_on_a_whole_mesh(shared):
    """Layers' own collectives, in branches and in CUDA graphs, with permutes that do not wait."""
    found = report(
        *STEP, "parallel.pp=4", "parallel.dp=4", "parallel.tp=2", "parallel.layer_split=even",
        "parallel.transfer_ticks=2", "parallel.zero_stage=2",
        f"parallel.sequence_parallel={shared}", f"parallel.vocab_parallel_pp={shared}",
    )  # fmt: skip
    permutes = found["permutes"]
    assert permutes["synchronous"] == 0
    assert permutes["asynchronous"] == 2
    assert permutes["hidden"]
    assert [copy for copy in found["buffer_copies"] if copy["size"] > VECTOR] == []
    assert found["graphs"]["whole"]
    shares = {(one["kind"], *one["axes"], one["looped"]): one for one in found["collectives"]}
    assert shares["collective-permute", "pp", True]["count"] == 2
    assert all(0 <= one["hidden"] <= one["size"] for one in shares.values())
    assert shares["collective-permute", "pp", True]["hidden"] > 0
    assert shares["reduce-scatter", "dp", False]["count"] > 0


EXPERTS = (*STEP, "model.n_experts=8", "model.experts_per_token=2", "model.d_expert=128",
           "parallel.pp=2", "parallel.dp=4", "parallel.ep=4", "model.n_layers=2",
           "parallel.layer_split=even")  # fmt: skip


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this XLA copies what conds pass on")
def test_rows_of_experts_travel_behind_the_other_half_of_a_pair():
    """And behind a shared expert in an F alone; without rounds three quarters of a pair's."""
    found = report(
        *EXPERTS, "parallel.schedule=dualpipe", "model.capacity_factor=1.25",
        "model.shared_experts=1",
    )  # fmt: skip
    (rows,) = (one for one in found["collectives"] if one["kind"] == "all-to-all")
    assert (rows["axes"], rows["looped"]) == (["ep"], True)
    size, hidden = rows["actions"]["F+BW"]
    assert hidden == size > 0
    size, hidden = rows["actions"]["F"]
    assert hidden > 0.49 * size > 0  # in one direction
    assert found["permutes"]["hidden"]
    assert found["graphs"]["whole"]


@needs_compiler
@pytest.mark.skipif(not importlib.util.find_spec("tokamax"), reason="needs jaxpipe[experts]")
def test_experts_have_a_kernel_each_for_f_b_and_w():
    found = report(*EXPERTS, "parallel.schedule=zb_h1", "train.remat=selective")
    assert "tokamax" in found["note"]
    assert found["custom_calls"]["mosaic_gpu_v2"] == 9
    assert found["graphs"]["whole"]


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this XLA copies what conds pass on")
def test_residuals_wait_in_the_hosts_memory():
    """Copied during products; the device's memory is less by the planned bytes."""
    sizes = (*STEP, "parallel.pp=4", "parallel.dp=2", "parallel.layer_split=even",
             "parallel.transfer_ticks=2")  # fmt: skip
    everything, away = report(*sizes), report(*sizes, "train.offload_layers=2")
    _, out, _ = plan("--json", *sizes, "train.offload_layers=2")
    planned = next(row["bytes"] for row in json.loads(out)["schedules"] if row["configured"])
    assert away["bytes"]["host"] == planned["host"] > everything["bytes"]["host"] == 0
    saved = everything["bytes"]["temporaries"] - away["bytes"]["temporaries"]
    assert 0.8 * planned["host"] < saved <= planned["host"]
    copies = away["host_copies"]
    assert copies["synchronous"] == 0
    assert copies["hidden"] == copies["asynchronous"] > 0
    waits = costs_of(load(SMALL, sizes)).kinds["layer"].waits
    rings = 2 * len({*waits["for_b"], *waits["for_w"]})  # no buffer is a copy of another
    assert away["custom_calls"]["AllocateBuffer"] >= rings
    assert away["permutes"]["hidden"]
    assert away["graphs"]["whole"]
    assert [copy for copy in away["buffer_copies"] if copy["size"] > VECTOR] == []
    assert everything["host_copies"] == {"asynchronous": 0, "synchronous": 0, "hidden": 0}


@pytest.mark.slow
@needs_compiler
def test_one_rank_has_transfers_of_one_tick_too():
    assert report("parallel.pp=1", "parallel.dp=1", "parallel.transfer_ticks=1")["graphs"]["whole"]


@pytest.mark.slow
@needs_compiler
def test_every_residual_can_wait_in_the_hosts_memory():
    """Of heads, too, whose reshape XLA would read from there."""
    sizes = ("parallel.pp=1", "parallel.dp=1", "train.compute_dtype=bfloat16")
    assert report(*sizes, "train.offload_layers=2")["bytes"]["host"] > 0


@pytest.mark.slow
@needs_compiler
def test_moments_wait_in_the_hosts_memory():
    """The step starts and ends without them on the device; they are moved outside the loop."""
    sizes = (
        *STEP, "parallel.pp=4", "parallel.dp=2", "parallel.layer_split=even",
        "parallel.transfer_ticks=2",
    )  # fmt: skip
    everything, away = report(*sizes), report(*sizes, "train.offload_moments=true")
    _, out, _ = plan("--json", *sizes, "train.offload_moments=true")
    planned = next(row["bytes"] for row in json.loads(out)["schedules"] if row["configured"])
    assert away["bytes"]["host"] == planned["host"] > everything["bytes"]["host"] == 0
    for size in ("arguments", "outputs", "aliased"):
        assert everything["bytes"][size] - away["bytes"][size] == planned["host"]
    # Not all of it: the moments of the embedding, a third of a rank's, come back together.
    assert everything["bytes"]["peak"] - away["bytes"]["peak"] > 0.75 * planned["host"]
    assert away["host_copies"]["asynchronous"] + away["host_copies"]["synchronous"] == 0
    assert away["permutes"]["hidden"]
    assert away["graphs"]["whole"]


@pytest.mark.slow
@needs_compiler
def test_moments_come_to_the_device_a_few_at_a_time():
    """Where they are most of the memory; all at once, the peak would fall by a third of them."""
    sizes = (
        "model.n_layers=8", "model.d_model=256", "model.d_ff=1024", "train.seq_len=32",
        "parallel.pp=1", "parallel.dp=1", "parallel.unroll_layers=8",
    )  # fmt: skip
    everything, away = report(*sizes), report(*sizes, "train.offload_moments=true")
    saved = everything["bytes"]["peak"] - away["bytes"]["peak"]
    assert saved > 0.98 * away["bytes"]["host"]


@needs_compiler
def test_a_program_says_that_moments_are_on_the_host():
    """As one for devices that are present does; XLA would otherwise not copy what it reads."""
    config = load(SMALL, ["parallel.pp=1", "parallel.dp=1", "train.offload_moments=true"])
    devices = check.describe_devices("h100", 2**30, "1x1x1")
    trainer = Trainer(resolve(config, Devices(count=1)), devices)
    moments = [leaf for leaf in jax.tree.leaves(trainer.state_shapes.optimizer) if leaf.ndim]
    text = check.lower_step(trainer)[1].as_text()
    assert text.count('mhlo.memory_kind = "pinned_host"') == 2 * len(moments)


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not HAS_CUDNN, reason="needs nvidia-cudnn-cu13")
def test_real_sizes_with_collectives_in_every_branch():
    """XLA's limit of collectives in flight matters here, unlike for small layers.

    XLA would also merge sums over replicas of small layers. Here most sums overlap with compute:
    that of the last tick with a gradient.
    """
    found = report("parallel.cp=2", config=LLAMA)
    shares = {(one["kind"], *one["axes"], one["looped"]): one for one in found["collectives"]}
    sums = shares["all-reduce", "dp", False]
    assert sums["hidden"] > 0.4 * sums["size"]
    permutes = found["permutes"]
    assert permutes["hides"] == [permutes["conditionals"]] * 2
    assert permutes["hidden"]
    assert found["custom_calls"]["__cudnn$fmhaScaleBiasSoftmax"] > 0


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this XLA copies what conds pass on")
def test_the_report_notices_the_loss_of_an_option():
    """XLA's flag gives the choice of graphs back to it. Other options matter at real sizes only."""
    (option,) = (o for o in of_purpose("step") if o.name == "xla_gpu_enable_command_buffer")
    place, fact = option.noticed.split(".")
    meshed = (*STEP, "parallel.pp=4", "parallel.dp=2", "parallel.layer_split=even")
    flag = f"--{option.name}=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL"
    assert not report(*meshed, flags=flag)[place][fact]


@pytest.mark.slow
@needs_compiler
def test_a_table_of_cards_and_schedules():
    alone = ("parallel.pp=2", "parallel.dp=1", "model.n_layers=2", "train.grad_accum_steps=2")
    code, out, errors = plan("--check-gpu", "a100,b200", "--schedules", "gpipe,1f1b", *alone)
    assert code == 0, errors
    rows = [line.split() for line in out.splitlines()[1:]]
    assert sorted((row[0], *{"gpipe", "1f1b"} & set(row)) for row in rows) == [
        ("a100", "1f1b"), ("a100", "gpipe"), ("b200", "1f1b"), ("b200", "gpipe"),
    ]  # fmt: skip
    assert "NOT HIDDEN" not in out


@pytest.mark.slow
@needs_compiler
def test_what_does_not_fit_is_one():
    alone = ("parallel.pp=1", "parallel.dp=1", "model.n_layers=1", "train.grad_accum_steps=1")
    code, out, _ = plan("--check-gpu", "h200", "--memory", "1MiB", *alone)
    assert code == 1
    assert "DOES NOT FIT" in out
    assert "on a card of the kind with more memory the step takes " in out
    assert out.count("\n") >= 7


@pytest.mark.parametrize(
    ("hidden", "with_room", "want"),
    [
        (0.01, check.WithRoom(9, 0.99), True),
        (0.9, check.WithRoom(9, 0.99), False),
        (0, None, False),
    ],
)
def test_memory_ran_short_if_more_of_it_hides_more(hidden, with_room, want):
    unknown = dict.fromkeys(field.name for field in fields(check.CompiledReport))
    collectives = SimpleNamespace(hidden_in_loop=hidden)
    known = {"collectives": collectives, "with_room": with_room}
    assert check.CompiledReport(**unknown | known).ran_short == want


@pytest.mark.skipif(HAS_COMPILER, reason="needs jaxpipe without [aot]")
def test_without_a_compiler_it_says_what_to_install():
    code, out, errors = plan("--check-gpu", "h100")
    assert (code, out) == (2, "")
    assert errors.startswith("error: ")
    assert "pip install -e '.[aot]'" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "9"], "parallel.pp=4 x parallel.dp=2 x parallel.tp=1 = 8 must equal"),
        (["parallel.pp=64"], "parallel.pp=64"),
        (["--devices", "8,10"], "are not a multiple of parallel.pp=4 x parallel.tp=1 = 4"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, capsys):
    assert main([SMALL, "--check-gpu", "h100", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("card", cards.CARDS)
def test_cards(card):
    memory = re.search(r"device_memory_size: (\d+)", cards.target_config(card))
    assert int(memory[1]) == DEVICES[card.upper()].memory
    assert 2e12 < cards.card_bandwidth(card) < 8e12
    assert cards.has_costs(card) == (card != "a100")
    config = cards.set_usable_memory(cards.target_config(card), 8e9)
    assert "device_memory_size: 10000000000" in config
    assert config.count("device_memory_size") == 1


def test_usable_share_is_that_of_a_run(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert usable_share() == 0.92
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert usable_share() == 0.9
