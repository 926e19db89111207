"""A run with experts: the same step on every mesh, its logs, its biases, and how it resumes."""

import json

import jax
import numpy as np
import pytest
from commands import SMALL
from resolving import resolved
from routed import restored, run

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.data.samples import PADDING
from jaxpipe.planning.rules.experts import check_recording
from jaxpipe.train import train
from jaxpipe.training.trainer import Trainer

SIZES = [
    "model.n_layers=2", "model.n_experts=4", "model.experts_per_token=2", "model.d_expert=16",
    "model.first_dense_layers=1", "model.router_aux_loss=0.01", "model.router_z_loss=0.001",
    "model.router_bias_rate=0.001", "train.eval_every=0", "train.steps=2",
]  # fmt: skip
MESHES = {
    "one": ["parallel.pp=1", "parallel.dp=1", "train.microbatch_size=4"],
    "ep": ["parallel.pp=2", "parallel.dp=4", "parallel.ep=2", "parallel.zero_stage=2"],
    "tp": ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.ep=2",
           "parallel.sequence_parallel=true", "train.microbatch_size=2"],
}  # fmt: skip
OVER_TP = ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.sequence_parallel=true",
           "parallel.ep_over_tp=true", "train.microbatch_size=2"]  # fmt: skip
MESHES["over tp"] = [*OVER_TP, "parallel.ep=4"]


def trainer_of(mesh, *overrides):
    config = configs.load(SMALL, [*SIZES, *MESHES[mesh], *overrides])
    parallel = config.parallel
    return Trainer.resolve(config, jax.devices()[: parallel.devices])


def batches(position, microbatches, batch_size, rows=None):
    while True:
        tokens = np.random.default_rng(position).integers(0, 256, (microbatches, batch_size, 33))
        tokens = tokens.astype(np.int32)
        yield {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}
        position += microbatches * batch_size


@pytest.fixture(scope="module")
def alone():
    trainer = trainer_of("one")
    state, metrics = trainer.train_step(trainer.init(), trainer.put(next(batches(0, 4, 4))))
    return jax.device_get((state.variables, metrics))


@pytest.mark.extended
def test_a_run_logs_loads_and_goes_on_elsewhere(tmp_path, alone):
    variables, metrics = alone
    trainer = trainer_of("ep")
    assert run(trainer, tmp_path, data=batches) == 0
    first, _ = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    for name in ("loss", "grad_norm", "router_entropy", "router_loss"):
        np.testing.assert_allclose(first[name], metrics[name], rtol=1e-6)
    for name in ("expert_load_max", "expert_load_mean", "expert_dropped_share"):
        np.testing.assert_array_equal(first[name], metrics[name])
    assert first["expert_load_mean"] == [4 * 4 * 32 * 2 / 4]
    assert first["expert_dropped_share"] == 0
    moved = np.abs(variables["router_bias"])
    assert ((moved == 0) | np.isclose(moved, 0.001)).all()
    assert moved.any()
    (state, _), (elsewhere, _) = restored(trainer, tmp_path), restored(trainer_of("tp"), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, state, elsewhere)
    assert np.abs(state["variables"]["router_bias"]).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp", "over tp"])
def test_devices_that_share_a_sparse_layer_make_the_same_step(alone, mesh):
    trainer = trainer_of(mesh)
    state, metrics = trainer.train_step(trainer.init(), trainer.put(next(batches(0, 4, 4))))
    variables, wanted = alone
    for name in wanted:
        np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-6)
    np.testing.assert_array_equal(state.variables["router_bias"], variables["router_bias"])


@pytest.mark.slow
def test_rows_of_any_length_leave_the_same_loads():
    """The same texts in rows twice as long: counts, the bias after the step, the losses."""
    trainer = trainer_of("ep", "train.variable_length=true", "train.pad_to_multiple_of=16")
    batch = {name: leaf[..., :16] for name, leaf in next(batches(0, 4, 4)).items()}
    batch["real"] = np.broadcast_to(np.int32(np.arange(16) < 13), batch["inputs"].shape)
    batch["targets"] = np.where(batch["real"], batch["targets"], -100)
    found = []
    for length in (16, 32):
        wide = {
            name: np.pad(leaf, [(0, 0)] * 2 + [(0, length - 16)], constant_values=PADDING[name])
            for name, leaf in batch.items()
        }
        state, metrics = trainer.train_step(trainer.init(), trainer.put(wide))
        found.append(jax.device_get((state.variables["router_bias"], metrics)))
    (bias, short), (again, long) = found
    np.testing.assert_array_equal(bias, again)
    assert short["expert_load_mean"].tolist() == [4 * 4 * 13 * 2 / 4]
    for name in ("loss", "grad_norm", "router_entropy", "router_loss"):
        np.testing.assert_allclose(long[name], short[name], rtol=1e-6)
    for name in ("expert_load_max", "expert_load_mean", "expert_dropped_share"):
        np.testing.assert_array_equal(long[name], short[name])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.n_experts=6", "parallel.dp=4", "parallel.ep=4"],
            "parallel.ep=4 must divide model.n_experts=6",
        ),
        (
            ["parallel.dp=4", "parallel.ep=3", "model.n_experts=6"],
            "dp=4 must be a multiple of .* x parallel.ep=3",
        ),
        (
            ["model.n_experts=6", "parallel.ep=3", *OVER_TP],
            "ep=3 with parallel.ep_over_tp=true must be a multiple of parallel.tp=2",
        ),
        (
            ["model.n_experts=8", "parallel.ep=8", *OVER_TP],
            "dp=2 x parallel.tp=2 must be a multiple of .* x parallel.ep=8: ep devices",
        ),
        (
            ["parallel.ep_buffer_factor=2"],
            "ep_buffer_factor=2.0 is read only with parallel.ep above 1",
        ),
        (
            [
                "parallel.dp=4",
                "parallel.ep=2",
                "parallel.ep_buffer_factor=2",
                "model.capacity_factor=1",
            ],
            "parallel.ep_buffer_factor=2.0 excludes model.capacity_factor=1.0",
        ),
        (["model.n_experts=1024", "parallel.dp=4", "parallel.ep=4"], "are more than 255 on each"),
        (
            ["model.n_experts=512", "parallel.dp=4", "parallel.ep=4", "parallel.ep_per_host=2"],
            "devices in 2 hosts are more than 255 on each",
        ),
        (["model.experts_per_token=5"], "model.experts_per_token=5 exceeds model.n_experts=4"),
    ],
)
def test_meshes_that_do_not_go_with_the_experts(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolved(configs.load(SMALL, [*SIZES, "parallel.pp=2", *overrides]))


@pytest.mark.parametrize("override", ["model.capacity_factor=-1", "model.router_score=tanh"])
def test_values_that_are_none(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        configs.load(SMALL, [*SIZES, override])


@pytest.mark.slow
def test_a_dense_checkpoint_is_not_for_a_sparse_model(tmp_path):
    dense = configs.load(SMALL, [*MESHES["one"], "train.eval_every=0", "train.steps=1"])
    assert run(Trainer.resolve(dense, tuple(jax.devices()[:1])), tmp_path, data=batches) == 0
    first = r"params/layers/1/mlp/w_down has shape \(64, 32\) there and none \(absent\) in this"
    with pytest.raises(ConfigError, match=f"is of another model: {first}"):
        restored(trainer_of("one"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("meshes", [("ep", "tp"), ("over tp", "over tp")])
def test_recorded_routes_are_trained_on_elsewhere(tmp_path, meshes):
    """The command writes a batch that other meshes and schedules can use, with its routes fixed."""
    path = tmp_path / "routes.npz"
    overrides = [*SIZES, *MESHES[meshes[0]], f"run.dir={tmp_path}", "parallel.schedule=zb_h1"]
    config = configs.load(SMALL, overrides)
    assert train(config, record_routes=path) == 0
    batch = dict(np.load(path))
    assert batch["routes"].shape == (4, 4, 32, 1, 2)
    replayed = trainer_of(meshes[1], "parallel.schedule=1f1b")
    state = replayed.init()
    _, metrics = replayed.train_step(state, replayed.put(batch))
    del batch["routes"]
    free = trainer_of(meshes[1], "parallel.schedule=1f1b")
    _, wanted = free.train_step(free.init(), free.put(batch))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-6)
    np.testing.assert_array_equal(metrics["expert_load_max"], wanted["expert_load_max"])


@pytest.mark.parametrize(
    ("overrides", "processes", "message"),
    [([], 1, "model.n_experts=0"), (SIZES, 2, "with 2 processes: one writes the whole batch")],
)
def test_routes_that_cannot_be_recorded(overrides, processes, message):
    with pytest.raises(ConfigError, match=message):
        check_recording(configs.load(SMALL, overrides), processes)
