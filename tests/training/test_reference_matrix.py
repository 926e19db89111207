"""Fast-LLM's reference configurations, each compared with the same run on another mesh.

Names and pairs are those of its `tests/utils/distributed_configs.py`: `df` and `bf` are
microbatches depth first and breadth first, `ce` chunks of the loss, `z` the ZeRO stage, `stp`
tensor with sequence parallelism, `sdp` replicas that share sequences, `ms` slices of sequences in
time, `pp2s1` two ranks with stages of one layer.

A comparison covers initial values (exact), losses, gradients, parameters after two updates, and in
float32 every layer's output for every example, and the gradient at it.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import relative
from layer_outputs import recording

from jaxpipe import config as configs
from jaxpipe.checkpoint import StateKeying
from jaxpipe.core.contract import Aux
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.training.trainer import Trainer

SEQUENCES, LENGTH, VOCABULARY = 8, 16, 48
BASE = f"""
[model]
n_layers = 4
d_model = 32
n_heads = 4
n_kv_heads = 2
d_ff = 48
vocab_size = {VOCABULARY}
[train]
steps = 4
grad_accum_steps = 1
microbatch_size = 8
seq_len = {LENGTH}
[optimizer]
lr = 1e-2
eps = 1e-2  # where gradients nearly vanish Adam would turn rounding into whole updates
"""


def split(m, **parallel):
    return {"train.grad_accum_steps": m} | {f"parallel.{k}": v for k, v in parallel.items()}


TIED = {"model.tie_embeddings": True}
BFS = {"schedule": "bfs"}
TP, STP = {"tp": 2}, {"tp": 2, "sequence_parallel": True}
SDP = {"dp": 2, "cp": 2}
S1, S2 = {"pp": 2, "virtual_stages": 2} | BFS, {"pp": 2} | BFS
CHUNKS = {"train.loss_chunks": 4}
MS4 = {"slices": 4}
# name: (its settings, the configuration it is compared with)
MATRIX = {
    "simple": (split(1), None),
    "bf16": (split(1) | {"train.compute_dtype": "bfloat16"}, "simple"),
    "fp16": (split(1) | {"train.compute_dtype": "float16"}, "simple"),
    "ce4": (split(1) | CHUNKS, "simple"),
    "ms4": (split(1, **MS4), "simple"),
    "df2": (split(2), "simple"),
    "df4": (split(4), "simple"),
    "df8": (split(8), "simple"),
    "df4_tied": (split(4) | TIED, None),
    "bf4": (split(4, **BFS), "df4"),
    "bf2_df2": (split(4, **BFS, breadth=2), "df4"),
    "df4_z2": (split(4, zero_stage=2), "df4"),
    "dp2": (split(1, dp=2), "df2"),
    "dp2_z2": (split(1, dp=2, zero_stage=2), "dp2"),
    "dp2_z3": (split(1, dp=2, zero_stage=3, reshard_after_forward=True), "dp2"),
    "dp2_z2_df4": (split(4, dp=2, zero_stage=2), "df8"),
    "sdp2": (split(1, **SDP), "simple"),
    "tp2": (split(1, **TP), "simple"),
    "stp2": (split(1, **STP), "simple"),
    "tp2_df4": (split(4, **TP), "df4"),
    "stp2_ce4": (split(1, **STP) | CHUNKS, "simple"),
    "dp2_stp2": (split(1, dp=2, **STP), "dp2"),
    "sdp2_stp2_bf4": (split(4, **SDP, **STP, **BFS), "df4"),
    "sdp2_stp2": (split(1, **SDP, **STP), "simple"),
    "pp2s2_bf4": (split(4, **S2), "df4"),
    "pp2s2_ms4": (split(1, **S2, **MS4), "ms4"),
    "pp2s1_bf4": (split(4, **S1) | TIED, "df4_tied"),
    "dp2_pp2s2_bf4": (split(4, dp=2, **S2), "dp2_z2_df4"),
    "stp2_pp2s1_bf4": (split(4, **STP, **S1), "df4"),
    "dp2_stp2_pp2s2_bf4": (split(4, dp=2, **STP, **S2), "df8"),
    "sdp2_stp2_pp2s2_ms4": (split(1, **SDP, **STP, **S2, **MS4), "simple"),
    "dp2_tp2_pp2s1_bf4": (split(4, dp=2, **TP, **S1) | TIED, "df4_tied"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("matrix") / "base.toml"
    path.write_text(BASE)
    return path


def trainer_of(base, name):
    settings, _ = MATRIX[name]
    settings = dict(settings)
    shared = settings.get("parallel.cp", 1)
    sequences = SEQUENCES // settings["train.grad_accum_steps"]
    settings["train.microbatch_size"] = sequences * shared // settings.get("parallel.dp", 1)
    as_toml = lambda value: str(value).lower() if isinstance(value, bool) else value  # noqa: E731
    config = configs.load(base, [f"{key}={as_toml(value)}" for key, value in settings.items()])
    check_settings(config)
    return Trainer.resolve(config, jax.devices()[: config.parallel.devices])


def batches_of(trainer):
    """Yield two steps' tokens, with the example that each belongs to, which `recording` reads."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, SEQUENCES, LENGTH + 1), np.int32)
    example = np.broadcast_to(np.arange(SEQUENCES, dtype=np.int32)[:, None], (SEQUENCES, LENGTH))
    for step in tokens:
        whole = {"inputs": step[:, :-1], "targets": step[:, 1:], "example": example}
        microbatches = trainer.config.train.grad_accum_steps
        rows = {name: leaf.reshape(microbatches, -1, LENGTH) for name, leaf in whole.items()}
        own = trainer.sharder.shard({"example": rows.pop("example")})
        yield trainer.put(rows) | jax.device_put(own, trainer.sharder.sharding)


@cache
def trained(base, name):
    """Return initial values, losses, gradients, updated parameters and layer outputs, by layer."""
    trainer = trainer_of(base, name)
    keying, recorded = StateKeying(trainer.layout, trainer.sharding), recording(trainer.model)
    pipeline = replace(trainer.pipeline, functions=recorded)
    keyed = lambda tree: jax.tree.map(np.asarray, keying.to_keyed(tree))  # noqa: E731
    state = trainer.init()
    init = keyed(state.params)

    @jax.jit  # one program, compiled once: a step that returns its gradients
    def step(state, batch):
        params, table = state.params, jnp.zeros((trainer.config.parallel.pp, SEQUENCES, LENGTH, 32))
        slots = [{"layer": slot, "tables": {"y": table, "dy": table}} for slot in params["layers"]]
        losses, found = pipeline.losses_and_gradients(params | {"layers": tuple(slots)}, batch)
        gradients = found | {"layers": tuple(slot["layer"] for slot in found["layers"])}
        state, metrics = trainer.update(state, losses.sum(), gradients, Aux())
        made = trainer.layout.unstack([slot["tables"] for slot in found["layers"]])
        return state, metrics["loss"], gradients, made

    first, second = batches_of(trainer)
    state, loss, gradients, made = step(state, first)
    state, last, *_ = step(state, second)
    return {
        "made": jax.tree.map(np.asarray, made),
        "init": init,
        "loss": float(loss),
        "last loss": float(last),
        "gradients": keyed(gradients),
        "updated": keyed(state.params),
    }


def test_one_replica_has_the_same_program_whatever_it_would_share(base):
    """Stage 2 of ZeRO on one device has nothing to shard, so programs are compared."""
    programs = []
    for name in ("df4_z2", MATRIX["df4_z2"][1]):
        trainer = trainer_of(base, name)
        batch = next(batches_of(trainer))
        del batch["example"]
        programs.append(trainer.train_step.lower(trainer.state_shapes, batch).as_text())
    assert programs[0] == programs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, (_, reference) in MATRIX.items() if reference and name != "df4_z2"]
)
def test_equals_its_reference(base, name):
    got, want = trained(base, name), trained(base, MATRIX[name][1])
    # Fast-LLM's own bounds for bfloat16: 2e-2 of the root mean square, or 5e-5 where that is less.
    # Float16 has three more bits.
    half = {"bf16": 1.0, "fp16": 1 / 8}.get(name)
    jax.tree.map(np.testing.assert_array_equal, got["init"], want["init"])
    assert all(layer["y"].any((1, 2)).all() for layer in want["made"])
    for loss in ("loss", "last loss"):
        assert got[loss] == pytest.approx(want[loss], rel=1.5e-2 * half if half else 1e-6)
    off = off_in_half if half else relative
    for part in ("gradients", "updated") if half else ("made", "gradients", "updated"):
        errors = jax.tree.map(off, got[part], want[part])
        assert max(jax.tree.leaves(errors)) <= (2e-2 * half if half else 1e-6), (part, errors)


def off_in_half(got, want):
    rms = [np.sqrt(np.mean(np.square(values))) for values in (got - want, want)]
    return rms[0] / max(rms[1], 5e-5 / 2e-2)
