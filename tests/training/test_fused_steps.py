"""Steps that overlap in one program leave, bit for bit, the state of the same steps one by one."""

import itertools
import re
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL
from jax import lax
from routed import batch_at
from toy import LENGTH, NOT_FINITE, TOY, init_toy, toy_params

from jaxpipe import config as configs
from jaxpipe.core.contract import StageFunctions
from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.mesh import PP, make_mesh
from jaxpipe.core.schedule import Lockstep
from jaxpipe.schedules import build, fuse_steps
from jaxpipe.training.fused import FusedSteps, overlap
from jaxpipe.training.trainer import Trainer

LAYERS, STEPS, MICROBATCHES, EXAMPLES = 4, 4, 6, 4
SIZES = [
    f"model.n_layers={LAYERS}", f"train.seq_len={LENGTH}", "train.eval_every=0",
    "checkpoint.every=0", f"train.grad_accum_steps={MICROBATCHES}", f"train.fused_steps={STEPS}",
]  # fmt: skip
TWO = ["parallel.pp=2", "parallel.dp=1"]
TWICE = ["parallel.schedule=zb_auto", "parallel.memory_limit=2p"]
# The norms of their gradients are 0.64, 0.52, 0.55 and 0.52.
BATCHES = [batch_at(number, MICROBATCHES, EXAMPLES) for number in (1, 0, 3, 4)]
CLIPS_NONE = "optimizer.clip_norm=0.7"
BROKEN = BATCHES[0] | {"positions": np.full_like(BATCHES[0]["positions"], NOT_FINITE)}
STEEP = BATCHES[0] | {"targets": np.zeros_like(BATCHES[0]["targets"])}  # a norm above 1


@dataclass(frozen=True)
class Toy:
    """The model interface that a trainer uses."""

    functions: StageFunctions

    def init_embed_head(self, key):
        return init_toy(key, 0)[0]

    def init_layer(self, key, index, kind):
        return init_toy(jax.random.fold_in(key, index), 1)[1][0]


@dataclass(frozen=True)
class ToyTrainer(Trainer):
    """A trainer of the toy; `poison` puts NaN into slots that must not be read."""

    functions: StageFunctions = TOY
    poison: bool = False

    @cached_property
    def model(self):
        return Toy(self.functions)

    @cached_property
    def execution(self):
        return replace(super().execution, poison_bubbles=self.poison)


def trainer_of(*overrides, **more):
    """Return a trainer on as many devices as the mesh needs; every mesh has the same batch."""
    parallel = configs.load(SMALL, overrides).parallel
    examples = f"train.microbatch_size={EXAMPLES // parallel.dp}"
    config = configs.load(SMALL, [*SIZES, *overrides, examples])
    return ToyTrainer.resolve(config, tuple(jax.devices()[: parallel.pp * parallel.dp]), **more)


def one_by_one(trainer, batches, state=None):
    """Run one program per step; return the last state and the metrics."""
    state, found = state or trainer.init(), []
    for batch in batches:
        state, metrics = trainer.train_step(state, trainer.put(batch))
        found.append(metrics)
    return state, {name: np.stack([each[name] for each in found]) for name in found[0]}


def at_once(steps, batches, state=None):
    """Run the steps in one program."""
    trainer = steps.trainer
    together = jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
    return steps.train_steps(state or trainer.init(), trainer.put(together))


def same(got, want):
    """Check state and losses bitwise, and norms up to the order of their sums."""
    (state, metrics), (wanted, numbers) = got, want
    jax.tree.map(np.testing.assert_array_equal, state, wanted)
    assert metrics.keys() == numbers.keys()
    for name, value in numbers.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6 if name == "grad_norm" else 0)


class Overlapping(FusedSteps):
    """Fused steps of which none ends the overlap."""

    def _accepts(self, *of_step):
        return jnp.bool_(True)


@pytest.mark.slow(unless=["*zb_h2-True"])
@pytest.mark.parametrize(
    ("overrides", "poison"),
    [
        ([*TWO, "parallel.schedule=zb_h2"], True),
        ([*TWO, "parallel.schedule=zb_h1"], False),
        ([*TWO, *TWICE], False),
        ([*TWO, "parallel.schedule=zbv", "parallel.defer_embed_head=true"], True),
        ([*TWO, "parallel.schedule=interleaved_1f1b", "parallel.transfer_ticks=2"], True),
        ([*TWO, "parallel.schedule=dualpipev"], False),
        (["parallel.pp=4", "parallel.dp=1", "parallel.in_flight=7"], True),
        (["parallel.pp=1", "parallel.dp=1", "optimizer.name=lion"], False),
        (["parallel.pp=1", "parallel.dp=1", "optimizer.name=nadamw"], False),
        ([*TWO, "optimizer.name=sgd"], False),
        (["parallel.pp=2", "parallel.dp=2", "parallel.schedule=zb_h2"], False),
        (["parallel.pp=2", "parallel.dp=2", "parallel.zero_stage=1"], False),
        (["parallel.pp=2", "parallel.dp=2", "parallel.zero_stage=2"], False),
        (["parallel.pp=2", "parallel.dp=2", "parallel.zero_stage=3"], False),
        ([*TWO, "parallel.layer_split=[3,1]", "train.compute_dtype=bfloat16"], False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_steps_that_overlap_are_steps_in_turn(overrides, poison):
    trainer = trainer_of(CLIPS_NONE, *overrides, poison=poison)
    same(at_once(Overlapping(trainer), BATCHES), one_by_one(trainer, BATCHES))


@pytest.mark.slow
def test_embed_head_in_shards_of_many_replicas_may_be_summed_otherwise():
    """They are sharded otherwise during fused steps, which may reorder a sum of four replicas."""
    trainer = trainer_of(CLIPS_NONE, "parallel.pp=2", "parallel.dp=4", "parallel.zero_stage=2")
    (got, _), (want, _) = at_once(Overlapping(trainer), BATCHES), one_by_one(trainer, BATCHES)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, want)


class CountedTicks(overlap.UpdatingTicks):
    """Ticks that are counted; `ranks` has a pipeline rank for each tick that it has run."""

    ranks: ClassVar[list[int]] = []

    def tick(self, *of_tick):
        jax.debug.callback(lambda rank: self.ranks.append(int(rank)), lax.axis_index(PP))
        return super().tick(*of_tick)


@cache
def steps_of(schedule):
    """Return compiled steps that may skip one non-finite step in a row, and count their ticks."""
    how = TWICE if schedule == "zb_auto" else [f"parallel.schedule={schedule}"]
    steps = FusedSteps(trainer_of(*TWO, *how, CLIPS_NONE, "train.skip_non_finite=1"))
    with mock.patch.object(overlap, "UpdatingTicks", CountedTicks):
        counted(steps, BATCHES)
    return steps


def counted(steps, batches):
    """Run the steps in one program; also return the number of ticks."""
    CountedTicks.ranks.clear()
    found = jax.block_until_ready(at_once(steps, batches))
    jax.effects_barrier()
    assert CountedTicks.ranks.count(0) == CountedTicks.ranks.count(1)
    return found, CountedTicks.ranks.count(0)


def ticks_of(steps, ended):
    """Return the ticks of steps whose overlap ends with these steps and with the last."""
    (validated,) = np.nonzero(steps.pipeline.tables.columns.steps.validate[:, 0])
    ends = [-1, *sorted({*ended, STEPS - 1})]
    return sum(validated[end - before - 1] + 1 for before, end in itertools.pairwise(ends))


# What ends the overlap, by step.
CASES = {
    "none": {},
    **{f"clipped {step}": {step: STEEP} for step in range(STEPS)},
    "all clipped": dict.fromkeys(range(STEPS), STEEP),
    "left out": {1: BROKEN},
    "clipped and left out": {0: STEEP, 2: BROKEN},
    "stopped": {1: BROKEN, 2: BROKEN, 3: BATCHES[3]},
}


@pytest.mark.slow(unless=["*-zb_h1"])
@pytest.mark.parametrize(
    "schedule", ["1f1b", "zb_h1", "zb_h2", "zb_auto", "zbv", "interleaved_1f1b", "dualpipe"]
)
@pytest.mark.parametrize("ended", CASES.values(), ids=CASES)
def test_steps_that_are_clipped_or_not_finite(ended, schedule):
    """Each costs at most a step's ticks. Then four more, which change nothing after a stop."""
    steps = steps_of(schedule)
    batches = [ended.get(number, batch) for number, batch in enumerate(BATCHES)]
    (got, ticks), want = counted(steps, batches), one_by_one(steps.trainer, batches)
    same(got, want)
    for number, norm in enumerate(want[1]["grad_norm"]):
        assert (norm < 0.7) == (number not in ended or ended[number] is BATCHES[3])
    if steps.overlap:
        assert ticks == ticks_of(steps, ended)
        assert ticks <= ticks_of(steps, ()) + len(ended) * ticks_of(steps, range(STEPS)) / STEPS
    more = BATCHES[1:3] + BATCHES[1:3]
    same(at_once(steps, more, got[0]), one_by_one(steps.trainer, more, want[0]))


@pytest.mark.parametrize(
    ("functions", "execution", "message"),
    [
        (TOY, Execution(Lockstep(vocab_parallel=True)), "but vocab_parallel=True"),
        (TOY, Execution(zero_stage=3, reshard_after_forward=True), "reshard_after_forward=True"),
        (TOY, Execution(compute_dtype=jnp.float16), "which compute_dtype=float16 needs"),
        (replace(TOY, outputs=lambda shared, x, rows: x), Execution(), "functions without outputs"),
        (
            replace(TOY, head=lambda shared, x, rows: (x @ shared["embed"].T).sum()),
            Execution(),
            "embedding and head read the same leaf",
        ),
    ],
)
def test_what_cannot_overlap(functions, execution, message):
    schedule, mesh = (
        fuse_steps(build("1f1b", pp=2, microbatches=2), 2),
        make_mesh(2, devices=jax.devices()[:2]),
    )
    pipeline = Pipeline(functions, schedule, mesh, execution=execution)
    shared, layers = toy_params(0, 2)
    params = {"embed_head": shared, "layers": pipeline.layout(1).stack(layers)}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            partial(overlap.run_updates, pipeline, steps=2, update=None, accepts=None),
            params,
            (),
            batch_at(0, 4, 2),
        )


@pytest.mark.slow
def test_ranks_that_hand_on_copy_no_matrix():
    """Neither parameters, moments and gradient sums nor ring buffers, nor in the loop's body."""
    trainer = trainer_of(*TWO, "parallel.schedule=zb_h2")
    batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *BATCHES)
    lowered = FusedSteps(trainer).train_steps.lower(trainer.state_shapes, batch)
    text = lowered.compile().as_text()
    computations = {part.split()[0]: part for part in text.split("\n\n") if part.startswith("%")}
    (overlap,) = re.findall(r" while\(.*body=(%[\w.]+)", text[text.index("\nENTRY") :])
    bodies = re.findall(r" while\(.*body=(%[\w.]+)", computations[overlap])
    branches = {
        body: re.findall(r"branch_computations={(%[\w.]+), (%[\w.]+)}", computations[body])
        for body in bodies
    }
    loop = max(bodies, key=lambda body: len(branches[body]))
    assert len(branches[loop]) == 8  # F, head, B, W, embedding; sums restarted; complete, validate
    ring = rf"\d+,{EXAMPLES},{LENGTH},"
    copies = rf"= \w+\[(?:\d+,\d+\]|{ring})\S* copy\("
    for handing_on in (loop, *(idle for idle, _ in branches[loop])):
        assert not re.findall(copies, computations[handing_on])
    assert any(re.findall(copies, computations[busy]) for _, busy in branches[loop])
