"""Checkpoints of any layout in any other: bitwise the same state, and training goes on alike."""

import random
from functools import cache
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpipe import config as configs
from jaxpipe.checkpoint import Checkpoints, Keying
from jaxpipe.config import ConfigError
from jaxpipe.planning.checks import validate
from jaxpipe.training.trainer import State, Trainer

SMALL = Path(__file__).parent / "data" / "small.toml"
SAVED, MICROBATCHES, EXAMPLES, LENGTH = 2, 8, 4, 16  # the step saved; sizes of a global batch
BASE = ("model.n_layers=8", "train.seq_len=16", "train.grad_accum_steps=8",
        "parallel.pp=1", "parallel.dp=1")  # fmt: skip
NAMED = [  # each restored into the next: pp 4, 2, 1, 3, 8, and schedules of every placement
    {"pp": 4, "dp": 2},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 3},
    {"pp": 1, "dp": 4, "sdp": 2, "zero_stage": 2},
    {"pp": 3, "layer_split": [1, 4, 3]},
    {"pp": 8, "zero_stage": 0},
    {"pp": 2, "schedule": "1f1b", "transfer_ticks": 2},
    {"pp": 4, "schedule": "dualpipe", "dp": 2},
    {"pp": 2, "schedule": "zbv", "tp": 2, "vocab_parallel_pp": True},
]
TIED = (0, 1, 3, 6, 7)  # those that a model with tied embeddings goes through
RANDOM = 3  # other layouts, of the untied model
PAIRS = {False: 40, True: 20}  # of the untied and of the tied model


def random_layout(chance):
    """Any layout that the rules allow."""
    while True:
        pp, tp, dp = (chance.choice(sizes) for sizes in ((1, 2, 3, 4), (1, 1, 2), (1, 2, 4)))
        layout = {
            "pp": pp, "tp": tp, "dp": dp,
            "schedule": chance.choice(
                ["gpipe", "1f1b", "interleaved_1f1b", "bfs", "zb_h1", "zb_h2", "interleaved_zb",
                 "v_half", "zbv", "dualpipe", "dualpipev"]
            ),
            "zero_stage": chance.randrange(4),
            "sequence_parallel": tp > 1 and chance.random() < 0.5,
            "vocab_parallel_pp": pp > 1 and chance.random() < 0.5,
            "transfer_ticks": chance.choice([1, 2]),
        }  # fmt: skip
        layout["reshard_after_forward"] = layout["zero_stage"] == 3 and chance.random() < 0.5
        try:
            if pp * tp * dp <= 8:
                validate(config_of(layout, tied=False))
                return layout
        except ConfigError:
            continue


def config_of(layout, tied):
    as_toml = lambda value: str(value).lower() if isinstance(value, bool) else value  # noqa: E731
    overrides = [f"parallel.{name}={as_toml(value)}" for name, value in layout.items()]
    per_device = EXAMPLES * layout.get("sdp", 1) // layout.get("dp", 1)
    overrides += [f"train.microbatch_size={per_device}"]
    return configs.load(SMALL, [*BASE, f"model.tie_embeddings={str(tied).lower()}", *overrides])


@cache
def chain(tied):
    """All layouts of a model, in the order in which each is restored into the next."""
    if tied:
        return [NAMED[index] for index in TIED]
    chance = random.Random(0)
    return [*NAMED, *(random_layout(chance) for _ in range(RANDOM))]


@cache
def trainer_of(index, tied):
    layout = chain(tied)[index]
    sizes = [layout.get(name, 1) for name in ("pp", "dp", "tp")]
    return Trainer(config_of(layout, tied), tuple(jax.devices()[: int(np.prod(sizes))]))


def batch(step):
    ids = np.random.default_rng(step).integers(
        0, 256, (MICROBATCHES, EXAMPLES, LENGTH + 1), np.int32
    )
    return {"inputs": ids[..., :-1], "targets": ids[..., 1:]}


def step_on(trainer, state, step):
    state, metrics = trainer.train_step(state, trainer.put(batch(step)))
    return state, float(metrics["loss"])


@cache
def uninterrupted(tied):
    trainer, losses = trainer_of(0, tied), []
    state = trainer.init()
    for step in range(SAVED + 1):
        state, loss = step_on(trainer, state, step)
        losses.append(loss)
    return losses


def keyed(trainer, state):
    return jax.tree.map(np.asarray, Keying(trainer.layout, trainer.sharding).keyed(state))


def opened(directory, trainer):
    keying = Keying(trainer.layout, trainer.sharding)
    return Checkpoints(directory, keep=1, asynchronous=True, keying=keying)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By layout and model: the directory of its checkpoint, and what is in it."""

    @cache
    def of(index, tied):
        trainer, directory = trainer_of(index, tied), tmp_path_factory.mktemp("saved")
        state = trainer.init()
        for step in range(SAVED):
            state, loss = step_on(trainer, state, step)
            assert loss == pytest.approx(uninterrupted(tied)[step], rel=1e-6)
        with opened(directory, trainer) as checkpoints:
            checkpoints.save(SAVED, state.parts(), {})
        return directory, keyed(trainer, state.parts())

    return of


def pairs(tied):
    """All pairs of neighbours in the chain, and others by chance."""
    layouts, chance = range(len(chain(tied))), random.Random(2 + int(tied))
    found = list(pairwise(layouts))
    rest = [(a, b) for a in layouts for b in layouts if a != b and (a, b) not in found]
    return found + chance.sample(rest, PAIRS[tied] - len(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "tied"),
    [(*pair, tied) for tied in (False, True) for pair in pairs(tied)],
)
def test_any_layout_goes_on_as_any_other(saved, before, after, tied):
    directory, want = saved(before, tied)
    trainer = trainer_of(after, tied)
    with opened(directory, trainer) as checkpoints:
        restored, _ = checkpoints.restore(trainer.state_shapes.parts(), say=pytest.fail)
    jax.tree.map(np.testing.assert_array_equal, keyed(trainer, restored), want)
    _, loss = step_on(trainer, State(**restored), SAVED)
    assert loss == pytest.approx(uninterrupted(tied)[SAVED], rel=1e-6)
