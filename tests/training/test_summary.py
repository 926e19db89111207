"""The summary before the first step describes the tables that the step really reads."""

import dataclasses
from pathlib import Path

import jax
import pytest
from rich.console import Console

from jaxpipe import config as configs
from jaxpipe.config.units import readable_bytes
from jaxpipe.core.schedule import Lockstep, lower, scan_buffers
from jaxpipe.planning import Devices, arrange, rank_bytes
from jaxpipe.planning.advice import advise_on_in_flight
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.run.watch import summary as summary_module
from jaxpipe.run.watch.summary import summary
from jaxpipe.training.trainer import Trainer

SMALL = Path(__file__).parents[1] / "data" / "small.toml"


def printed(trainer):
    console = Console(width=120)
    with console.capture() as captured:
        console.print(summary(trainer))
    return captured.get()


def test_deferred_ends_are_counted():
    config = configs.load(
        SMALL, ["parallel.pp=2", "parallel.dp=1", "parallel.schedule=zb_h1",
                "parallel.defer_embed_head=true", "train.grad_accum_steps=8"],
    )  # fmt: skip
    trainer = Trainer.resolve(config, tuple(jax.devices()[:2]))

    def activations(lockstep):
        planned = rank_bytes(config, trainer.layout, scan_buffers(trainer.schedule, lockstep))
        return readable_bytes(planned.activations)

    assert activations(Lockstep(defer_embed_head=True)) != activations(Lockstep())
    assert activations(Lockstep(defer_embed_head=True)) in printed(trainer)


def test_what_waits_on_the_host_is_shown():
    more = ["parallel.pp=2", "parallel.dp=1", "train.offload_layers=1"]
    trainer = Trainer.resolve(configs.load(SMALL, more), tuple(jax.devices()[:2]))
    planned = rank_bytes(trainer.config, trainer.layout, trainer.plan.buffers)
    assert "on the host" in (shown := printed(trainer))
    assert readable_bytes(planned.host) in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("auto", "embedding on the first pipeline rank, head on the last"),
        ("true", "on all pipeline ranks, each with a shard"),
    ],
)
def test_it_says_whose_the_ends_are(given, said):
    mesh = ["parallel.pp=2", "parallel.dp=1", f"parallel.vocab_parallel_pp={given}"]
    trainer = Trainer.resolve(configs.load(SMALL, mesh), tuple(jax.devices()[:2]))
    assert said in printed(trainer)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("parallel.in_flight=3",),
        ("parallel.transfer_ticks=2", "parallel.defer_embed_head=true"),
        ("parallel.schedule=dualpipe", "train.grad_accum_steps=8"),
    ],
)
def test_checks_summary_and_executor_share_one_set_of_tables(more, monkeypatch):
    monkeypatch.setattr(summary_module, "advise_on_in_flight", lambda _: None)  # on other tables
    mesh = ("parallel.pp=2", "parallel.dp=4", "runtime.cpu_devices=8")
    config = configs.load(SMALL, [*mesh, *more])
    lower.cache_clear()
    check_settings(config)
    trainer = Trainer.resolve(config)
    assert f"{trainer.pipeline.tables.ticks} ticks" in printed(trainer)
    assert lower.cache_info().misses == 1
    assert trainer.plan.schedule == arrange(config, Devices("cpu")).schedule
    assert trainer.pipeline.tables is trainer.plan.tables


@pytest.mark.parametrize(
    ("more", "bubble"),
    [
        # By hand, for F = 1 and BW = 2: with 2 P - 1 = 7 live microbatches all ranks run an F and a
        # BW in every steady tick, so of P + M - 1 times 3 all but M times 3 is idle.
        ((), 3 / 11),
        (("train.grad_accum_steps=64",), 3 / 67),
        (("parallel.in_flight=7",), None),  # as advised
        (("parallel.schedule=gpipe",), None),
        (("parallel.schedule=zb_h1",), None),
    ],
)
def test_idle_time_that_a_setting_avoids_is_named(more, bubble):
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.toml"
    shown = printed(Trainer.resolve(configs.load(quickstart, more)))
    advice = [line for line in shown.splitlines() if line.startswith("less idle time")]
    if bubble is None:
        assert not advice
    else:
        assert f"parallel.in_flight=7 makes it {bubble:.1%}, with up to 7 live" in advice[0]
        again = printed(Trainer.resolve(configs.load(quickstart, [*more, "parallel.in_flight=7"])))
        assert f"{bubble:.1%} (bubble" in again


def test_idle_time_is_not_avoided_where_memory_is_short():
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.toml"
    plan = Trainer.resolve(configs.load(quickstart)).plan
    assert advise_on_in_flight(plan)
    small = dataclasses.replace(plan.devices, memory=plan.memory.total)
    assert advise_on_in_flight(dataclasses.replace(plan, devices=small)) is None
