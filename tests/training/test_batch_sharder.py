"""The rows of a batch that a process reads, and the devices' shards of them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from commands import SMALL, losses

from jaxpipe import config as configs
from jaxpipe import train
from jaxpipe.config import ConfigError
from jaxpipe.core.mesh import make_mesh
from jaxpipe.training.batch_sharder import BatchSharder, random_batch


def sharders(*overrides, processes=1, pp=2, dp=4, tp=1, numbered=True):
    """Return the sharder of a process; each process has equally many virtual devices, in order."""
    sizes = [f"parallel.pp={pp}", f"parallel.dp={dp}", f"parallel.tp={tp}"]
    config = configs.load(SMALL, [*sizes, "train.microbatch_size=2", *overrides])
    mesh = make_mesh(
        pp, dp, tp, jax.devices()[: pp * dp * tp], pipeline_first=config.parallel.pipeline_first
    )
    each = pp * dp * tp // processes
    process_of = np.vectorize(lambda device: SimpleNamespace(process_index=device.id // each))
    seen = SimpleNamespace(devices=process_of(mesh.devices), shape=mesh.shape)
    keys = "inputs", "targets", "positions", *["samples"] * numbered
    keys += ("segments",) * bool(config.data.documents) + ("real", "routes") * bool(
        config.model.routed_experts
    )
    return BatchSharder(config, mesh, keys), BatchSharder(config, seen, keys)


@pytest.mark.parametrize(
    ("processes", "overrides", "want"),
    [
        (1, [], [(0, 8)]),
        (2, [], [(0, 8), (0, 8)]),  # one pipeline rank each, with all replicas
        (4, [], [(0, 4), (4, 8), (0, 4), (4, 8)]),
        (4, ["parallel.pipeline_first=true"], [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (4, ["parallel.pipeline_first=true", "parallel.cp=2"], [(0, 2), (0, 2), (2, 4), (2, 4)]),
    ],
)
def test_a_process_reads_the_rows_of_its_replicas(processes, overrides, want):
    _, seen = sharders(*overrides, processes=processes)
    rows = [seen.rows(process) for process in range(processes)]
    assert [(of.start, of.stop) for of in rows] == want


@pytest.mark.parametrize("overrides", [[], ["parallel.cp=2"], ["parallel.slices=4"]], ids=str)
def test_rows_become_what_devices_have_of_the_whole(overrides, monkeypatch):
    """For the last two replicas, as in a process that has only their devices."""
    full_sharder, _ = sharders(*overrides, "model.vocab_size=4096", "train.seq_len=16")
    shape = (4, full_sharder.config.batch_shape["batch_size"], 16)
    ids = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    batch = {"inputs": ids, "targets": ids + 1}
    want = full_sharder.put(batch, position=100)
    half = slice(shape[1] // 2, shape[1])
    part = {name: leaf[:, half] for name, leaf in batch.items()}
    monkeypatch.setattr(BatchSharder, "rows", lambda self: half)
    own = {}

    def only_own(shape, sharding, callback):
        """Request only the shards of these replicas' devices."""
        places = sharding.devices_indices_map(shape)
        of_replicas = full_sharder.mesh.devices[:, 0, 2:].flat
        own.update({device: callback(places[device]) for device in of_replicas})
        return dict(own)

    monkeypatch.setattr(jax, "make_array_from_callback", only_own)
    for name, found in full_sharder.put(part, position=100).items():
        assert len(found) == 4
        for shard in want[name].addressable_shards:
            if shard.device in found:
                np.testing.assert_array_equal(found[shard.device], shard.data)


def test_samples_are_numbered_in_the_order_of_the_run():
    of_run, _ = sharders()
    ids = np.zeros((4, 8, 32), np.int32)
    numbers = of_run.put({"inputs": ids, "targets": ids}, position=2**31 - 8)["samples"]
    want = (np.arange(32) + 2**31 - 8) % 2**31
    np.testing.assert_array_equal(np.asarray(numbers)[..., 0], want.reshape(4, 8))
    assert "samples" not in of_run.put({"inputs": ids, "targets": ids})


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_drops_as_one_that_never_stopped(tmp_path):
    settings = [
        "model.dropout=0.2", "model.attention_dropout=0.1", "optimizer.decay=constant",
        "train.eval_every=0", "checkpoint.every=0",
    ]  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    elsewhere = ["parallel.pp=2", "parallel.tp=2", "parallel.schedule=zb_h1"]
    for directory, steps, layout in ((whole, 4, []), (parts, 2, []), (parts, 4, elsewhere)):
        how = [f"run.dir={directory}", f"train.steps={steps}", *settings, *layout]
        assert train.main([str(SMALL), *how]) == 0
    want, got = losses(whole), losses(parts)
    np.testing.assert_allclose(
        [got[step] for step in range(1, 5)], [want[step] for step in range(1, 5)], rtol=1e-6
    )


def packed_sharder(*overrides):
    packing = "data.packing=best_fit", "data.max_documents=3", "train.seq_len=8"
    return sharders(*packing, *overrides)[0]


def test_a_run_balances_its_rows_only_where_it_is_asked_to():
    assert "balance" not in packed_sharder().sizes
    balance = packed_sharder("data.balance_rows=8", "train.microbatch_size=2").sizes["balance"]
    assert balance.size == 2
    assert balance.attention_of(20) == 4 * balance.attention_of(10) > 0


def packed_rows(segments, positions):
    """Return a batch `[4, 8, 8]` with this last row; the other rows are one document each."""
    batch = random_batch(packed_sharder().config)
    for name, row in (("segments", segments), ("positions", positions)):
        batch[name] = np.array(batch[name])
        batch[name][-1, -1] = row
    return batch


def test_documents_are_sharded_like_tokens():
    whole = packed_sharder("parallel.cp=2", "parallel.slices=2")
    batch = random_batch(whole.config)
    batch["inputs"] = batch["positions"] + 100 * batch["segments"]
    placed = whole.put(batch)
    assert placed.keys() == {"inputs", "targets", "segments", "positions", "slice"}
    assert (np.asarray(placed["inputs"]) == np.asarray(placed["positions"])).all()
    assert whole.leaves == ("inputs", "targets", "segments", "positions", "samples")


@pytest.mark.parametrize(
    ("segments", "positions", "message"),
    [
        ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4, "a row holds 4 documents, but data.max_documents=3"),
        ([0, 0, 1, 1, 1, 2, 2, -1], [0, 1, 2, 3, 4, 0, 1, 0], r"\(3, 7, 2\).* 1 at position 2"),
        ([0, 0, 0, 1, 1, 0, 0, -1], [0, 1, 2, 0, 1, 0, 1, 0], r"\(3, 7, 5\).* 0 at position 0"),
        ([0, 0, 2, 2, 2, 2, -1, -1], [0, 1, 0, 1, 2, 3, 0, 0], r"\(3, 7, 2\).* 2 at position 0"),
        ([0, 0, -1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 2, 3, 4], r"\(3, 7, 3\).* 1 at position 0"),
        ([0, 0, 0, 0, 1, 1, 1, 1], [1, 2, 3, 4, 0, 1, 2, 3], r"\(3, 7, 0\).* 0 at position 1"),
    ],
)
def test_documents_that_kernels_would_mix_are_refused(segments, positions, message):
    with pytest.raises(ConfigError, match=message):
        packed_sharder().put(packed_rows(segments, positions))


def test_documents_that_are_right_are_not_refused():
    packed_sharder().put(packed_rows([0, 0, 0, 1, 2, 2, -1, -1], [0, 1, 2, 0, 0, 1, 9, 0]))
    packed_sharder().put(packed_rows([-1] * 8, [3] * 8))


@pytest.mark.parametrize(
    ("name", "token", "says"),
    [
        ("inputs", 256, r"inputs \(3, 7, 2\) of the batch is 256: tokens are 0 to 255"),
        ("inputs", -100, "inputs .* is -100"),
        ("targets", 256, "targets .* is 256"),
        ("targets", -1, "targets .* is -1: .*, or -100 where a target is left out"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(name, token, says):
    sharder = sharders()[0]
    batch = random_batch(sharder.config)
    batch[name] = batch[name].copy()
    batch[name][3, 7, 2] = token
    with pytest.raises(ConfigError, match=says):
        sharder.put(batch)


@pytest.mark.parametrize("varies", ["true", "false"])
@pytest.mark.parametrize("experts", [True, False])
def test_experts_alone_are_told_what_is_padding(experts, varies):
    how = [*["model.n_experts=4"] * experts, f"train.variable_length={varies}"]
    sharder = sharders(*how, numbered=False)[0]
    batch = random_batch(sharder.config) | {"real": np.ones((4, 8, 32), bool)}
    assert ("real" in sharder.put(batch)) == experts
    assert ("real" in sharder.shapes(32)) == (experts and varies == "true")
    batch["real"][1, 2, 3] = False
    with pytest.raises(
        ConfigError, match=r"real \(1, 2, 3\) .* is 0: the target of padding must be"
    ):
        sharder.put(batch)
    with pytest.raises(ConfigError, match=r"real \(0, 0, 0\) of the batch is 3: 1 marks a token"):
        sharder.put(batch | {"real": np.full((4, 8, 32), 3)})
    del batch["real"]
    if experts and varies == "true":
        with pytest.raises(ConfigError, match="has only inputs, targets: give `real`, 1 at tok"):
            sharder.put(batch)


OF_BATCH = (4, 8, 32)


@pytest.mark.parametrize(
    "shape", [(4, 16, 32), (4, 4, 32), (4, 1, 32), (3, 8, 32), (8, 8, 32), (4, 8, 16), (4, 8)]
)
def test_batches_of_another_shape_are_refused(shape):
    sharder, _ = sharders()
    ids = np.zeros(shape, np.int32)
    with pytest.raises(ConfigError) as raised:
        sharder.put({"inputs": ids, "targets": ids})
    assert (
        f"inputs of the batch are {list(shape)}, but the configuration asks for [M, B, L] = [4"
        in (str(raised.value))
    )


def test_shorter_rows_need_a_variable_length_and_whole_shards():
    sharder, _ = sharders("train.variable_length=true", "parallel.slices=4")
    for length, fits in ((8, True), (32, True), (6, False), (36, False), (0, False)):
        ids = np.zeros((4, 8, length), np.int32)
        if fits:
            sharder.put({"inputs": ids, "targets": ids})
            continue
        with pytest.raises(ConfigError, match="or L a multiple of 4 below: give rows of that"):
            sharder.put({"inputs": ids, "targets": ids})


IDS = np.zeros(OF_BATCH, np.int32)
LOSS = ["train.loss=x:y", 'train.loss_rows=["gain", "choices[2]"]']


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"targets": IDS[:, :1]}, r"targets of the batch is int32\[4, 1, 32\], but with inp"),
        ({"targets": IDS[..., :16]}, "targets of the batch is int32.4, 8, 16., but"),
        ({"positions": IDS[:1]}, "positions of the batch is int32.1, 8, 32., but"),
        ({"positions": IDS - 1}, "positions .* is -1: positions of tokens are 0 to 63 with mod"),
        ({"positions": IDS + 64}, "positions .* is 64: positions of tokens are 0 to 63"),
        ({"real": IDS[..., 0]}, "real of the batch is int32.4, 8., but .* 1 at tokens and 0 at"),
        ({"real": np.ones((4, 8, 1), int)}, "real of the batch is .*4, 8, 1., but with inputs"),
        ({"samples": IDS + np.arange(32)}, "samples .0, 0, 1. .* is 1: every row has one number"),
        ({"gain": np.zeros((4, 8), "f")}, "gain of the batch is float32.4, 8., but"),
        ({"gain": np.zeros(OF_BATCH, complex)}, "gain .* is complex128.*is read as float32: "),
        ({"choices": IDS}, "choices .* is int32.4, 8, 32., but .* and .2. of its own"),
        ({"choices": np.full((*OF_BATCH, 2), 256)}, "choices .0, 0, 0, 0. of the batch is 256: to"),
        ({"choices": np.zeros((*OF_BATCH, 2))}, "choices of the batch is float64.*read as int32"),
        ({"inputs": IDS.astype(float)}, "inputs .* is float64.*is read as int32: give integers"),
        ({"inputs": IDS.astype(bool)}, "inputs of the batch is bool"),
        ({"inputs": IDS + np.int64(2**40)}, "inputs of the batch has values beyond int32"),
        ({"inputs": [[1, 2], [3]]}, "inputs of the batch is no array"),
        ({"segments": IDS}, "an array 'segments' that this model does not read: leave it out"),
        ({"slice": IDS}, "an array 'slice' that this model"),
        ({"routes": IDS}, "an array 'routes' that this model does not read"),
        ({"gian": IDS}, "an array 'gian' that this model does not read: .* it reads inp"),
    ],
)  # fmt: skip
def test_every_array_of_a_batch_is_checked(rows, says):
    sharder = sharders("model.max_seq_len=64")[0]
    config = configs.load(SMALL, ["parallel.pp=2", "parallel.dp=4", "model.max_seq_len=64", *LOSS,
                                  "train.microbatch_size=2"])  # fmt: skip
    sharder = replace(sharder, config=config, keys=(*sharder.keys, "gain", "choices", "slice"))
    with pytest.raises(ConfigError, match=says):
        sharder.put({"inputs": IDS, "targets": IDS, **rows})


def test_arrays_of_other_integers_and_floats_become_those_of_a_step():
    sharder, _ = sharders()
    placed = sharder.put({"inputs": IDS.astype(np.uint8), "targets": IDS.tolist()})
    assert {leaf.dtype for leaf in placed.values()} == {np.dtype("int32")}
    with pytest.raises(ConfigError, match="the batch has no 'targets', only inputs: give integ"):
        sharder.put({"inputs": IDS})
    with pytest.raises(ConfigError, match="the batch has samples, and position=0 numbers them to"):
        sharder.put({"inputs": IDS, "targets": IDS, "samples": IDS}, 0)


EXPERTS = ["model.n_experts=4", "model.experts_per_token=2", "model.d_expert=16"]


@pytest.mark.parametrize("wrong", [[0, -1], [0, 4], [255, 255], [1, 1]], ids=str)
def test_routes_are_different_experts_at_every_token(wrong):
    """And free where `real` marks padding."""
    sharder, _ = sharders(*EXPERTS)
    layers = sharder.config.model.n_layers
    right = np.broadcast_to(np.uint8([3, 1]), (*OF_BATCH, layers, 2))
    routes = right.astype(np.int64)
    routes[2, 5, 7, 1] = wrong
    batch = {"inputs": IDS, "targets": np.where(np.arange(32) < 7, IDS, -100)}
    assert sharder.put(batch | {"routes": right})["routes"].dtype == np.int32
    says = (
        rf"routes \(2, 5, 7, 1\) of the batch are \[{wrong[0]}, {wrong[1]}\], but every token choo"
    )
    with pytest.raises(ConfigError, match=says):
        sharder.put(batch | {"routes": routes})
    sharder.put(batch | {"routes": routes, "real": np.broadcast_to(np.arange(32) < 7, OF_BATCH)})
    for other in (right[..., :1, :], right[..., :1], right[..., 0]):
        with pytest.raises(
            ConfigError, match="routes of the batch is uint8|int32.*experts_per_tok"
        ):
            sharder.put(batch | {"routes": other})


def test_rows_that_are_to_be_packed_must_tell_their_documents():
    batch = random_batch(packed_sharder().config)
    del batch["positions"]
    with pytest.raises(ConfigError, match="the batch has only inputs, targets, segments: give"):
        packed_sharder().put(batch)
