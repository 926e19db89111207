"""Checkpoints of any layout in any other: bitwise the same state, and training continues alike."""

from functools import cache
from itertools import permutations
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpipe import config as configs
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.training.trainer import Trainer

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
SAVED, MICROBATCHES, EXAMPLES, LENGTH = 2, 8, 4, 16  # the step saved; sizes of a global batch
BASE = ("model.n_layers=8", "train.seq_len=16", "train.grad_accum_steps=8",
        "parallel.pp=1", "parallel.dp=1")  # fmt: skip
LAYOUTS = [  # pp 4, 2, 1, 3 and 8; stages in a loop, in rounds, in a V and from both ends
    {"pp": 4, "dp": 2},
    {
        "pp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "zero_stage": 3,
        "reshard_after_forward": True,
        "unroll_layers": 1,
    },
    {"pp": 1, "dp": 4, "cp": 4, "cp_method": "ring", "cp_heads": 2, "zero_stage": 2},
    {"pp": 3, "layer_split": [0, 8, 0]},  # embedding and head alone
    {"pp": 8, "zero_stage": 0},
    {"pp": 2, "schedule": "interleaved_zb", "transfer_ticks": 2},
    {"pp": 4, "schedule": "dualpipe", "dp": 2},
    {"pp": 2, "schedule": "zbv", "tp": 2, "vocab_parallel_pp": True},
    # replicas with sharded experts
    {"pp": 2, "dp": 4, "ep": 4, "zero_stage": 2},
    {"pp": 2, "dp": 2, "ep": 2, "tp": 2, "schedule": "dualpipev", "zero_stage": 3},
    {
        "pp": 2,
        "dp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "ep": 4,
        "ep_over_tp": True,
        "zero_stage": 2,
    },
]
PLAIN = {
    "pp": 1, "dp": 1, "tp": 1, "cp": 1, "schedule": "1f1b", "layer_split": "even",
    "zero_stage": 1, "sequence_parallel": False, "vocab_parallel_pp": False,
    "reshard_after_forward": False, "transfer_ticks": 0, "ep": 1, "ep_over_tp": False,
    "unroll_layers": 0,
}  # fmt: skip
MODELS = {  # differing settings, and the layouts that each model goes through
    "dense": ([], range(8)),
    "tied": (["model.tie_embeddings=true"], (1, 2, 7)),
    "sparse": (["model.n_layers=4", "model.n_experts=8", "model.experts_per_token=2",
                "model.d_expert=32", "model.first_dense_layers=1", "model.router_bias_rate=0.01"],
               (0, 8, 9, 10)),
}  # fmt: skip


def config_of(layout, model):
    as_toml = lambda value: str(value).lower() if isinstance(value, bool) else value  # noqa: E731
    overrides = [f"parallel.{name}={as_toml(value)}" for name, value in layout.items()]
    per_device = EXAMPLES * layout.get("cp", 1) // layout.get("dp", 1)
    overrides += [f"train.microbatch_size={per_device}"]
    return configs.load(SMALL, [*BASE, *MODELS[model][0], *overrides])


@cache
def trainer_of(index, model):
    layout = LAYOUTS[index]
    sizes = [layout.get(name, 1) for name in ("pp", "dp", "tp")]
    return Trainer.resolve(config_of(layout, model), tuple(jax.devices()[: int(np.prod(sizes))]))


def batch(step):
    ids = np.random.default_rng(step).integers(
        0, 256, (MICROBATCHES, EXAMPLES, LENGTH + 1), np.int32
    )
    return {"inputs": ids[..., :-1], "targets": ids[..., 1:]}


def step_on(trainer, state, step):
    state, metrics = trainer.train_step(state, trainer.put(batch(step)))
    return state, float(metrics["loss"])


@cache
def uninterrupted(model):
    trainer, losses = trainer_of(MODELS[model][1][0], model), []
    state = trainer.init()
    for step in range(SAVED + 1):
        state, loss = step_on(trainer, state, step)
        losses.append(loss)
    return losses


def keyed(trainer, state):
    return jax.tree.map(np.asarray, StateKeying(trainer.layout, trainer.sharding).to_keyed(state))


def opened(directory, trainer):
    keying = StateKeying(trainer.layout, trainer.sharding)
    return CheckpointStore(directory, keep=1, asynchronous=True, keying=keying)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint's directory and its content, by layout and model."""

    @cache
    def of(index, model):
        trainer, directory = trainer_of(index, model), tmp_path_factory.mktemp("saved")
        state = trainer.init()
        for step in range(SAVED):
            state, loss = step_on(trainer, state, step)
            assert loss == pytest.approx(uninterrupted(model)[step], rel=1e-6)
        with opened(directory, trainer) as checkpoints:
            checkpoints.save(SAVED, state.parts(), {})
        return directory, keyed(trainer, state.parts())

    return of


def changes(before, after):
    """Return the changes of a restore: both layouts, and every setting that differs, each way."""
    old, new = (PLAIN | LAYOUTS[index] for index in (before, after))
    found = {("saved", before), ("restored", after)}
    for name in PLAIN:
        if str(old[name]) != str(new[name]):
            kinds = name, str(old[name]), str(new[name])
            sizes = name, "more" if str(old[name]) < str(new[name]) else "less"
            found.add(kinds if name == "schedule" else sizes)
    return found


def pairs(layouts):
    """Return few pairs with all changes that any pair has, greedily by most new ones."""
    every = {pair: changes(*pair) for pair in permutations(layouts, 2)}
    left, chosen = set().union(*every.values()), []
    while left:
        chosen.append(max(every, key=lambda pair: len(every[pair] & left)))
        left -= every[chosen[-1]]
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "model"),
    [(*pair, model) for model, (_, layouts) in MODELS.items() for pair in pairs(layouts)],
)
def test_any_layout_goes_on_as_any_other(saved, before, after, model):
    directory, want = saved(before, model)
    trainer = trainer_of(after, model)
    with opened(directory, trainer) as checkpoints:
        restored, _ = checkpoints.restore(trainer.state_shapes.parts(), say=pytest.fail)
    jax.tree.map(np.testing.assert_array_equal, keyed(trainer, restored), want)
    _, loss = step_on(trainer, trainer.state_of(restored), SAVED)
    assert loss == pytest.approx(uninterrupted(model)[SAVED], rel=1e-6)
