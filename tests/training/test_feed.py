"""Which rows of a batch a process reads, and that devices get the same from them as from all."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from commands import SMALL, losses

from jaxpipe import config as configs
from jaxpipe import train
from jaxpipe.parallel import make_mesh
from jaxpipe.training.feed import Feed


def feed(*overrides, processes=1, pp=2, dp=4, tp=1, numbered=True):
    """Of virtual devices of which each process has equally many, in order."""
    sizes = [f"parallel.pp={pp}", f"parallel.dp={dp}", f"parallel.tp={tp}"]
    config = configs.load(SMALL, [*sizes, "train.microbatch_size=2", *overrides])
    mesh = make_mesh(
        pp, dp, tp, jax.devices()[: pp * dp * tp], pipeline_first=config.parallel.pipeline_first
    )
    each = pp * dp * tp // processes
    process_of = np.vectorize(lambda device: SimpleNamespace(process_index=device.id // each))
    seen = SimpleNamespace(devices=process_of(mesh.devices), shape=mesh.shape)
    return Feed(config, mesh, numbered), Feed(config, seen, numbered)


@pytest.mark.parametrize(
    ("processes", "overrides", "want"),
    [
        (1, [], [(0, 8)]),
        (2, [], [(0, 8), (0, 8)]),  # a rank each, with all replicas
        (4, [], [(0, 4), (4, 8), (0, 4), (4, 8)]),
        (4, ["parallel.pipeline_first=true"], [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (4, ["parallel.pipeline_first=true", "parallel.sdp=2"], [(0, 2), (0, 2), (2, 4), (2, 4)]),
    ],
)
def test_a_process_reads_the_rows_of_its_replicas(processes, overrides, want):
    _, seen = feed(*overrides, processes=processes)
    rows = [seen.rows(process) for process in range(processes)]
    assert [(of.start, of.stop) for of in rows] == want


@pytest.mark.parametrize(
    "overrides", [[], ["parallel.sdp=2", "train.seq_len=16"], ["parallel.slices=4"]], ids=str
)
def test_rows_become_what_devices_have_of_the_whole(overrides, monkeypatch):
    """Of the last two replicas, as a process would that has only their devices."""
    whole_feed, _ = feed(*overrides)
    shape = (4, whole_feed.config.batch_shape["batch_size"], 16)
    ids = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    batch = {"inputs": ids, "targets": ids + 1}
    want = whole_feed.put(batch, position=100)
    half = slice(shape[1] // 2, shape[1])
    part = {name: leaf[:, half] for name, leaf in batch.items()}
    monkeypatch.setattr(Feed, "rows", lambda self: half)
    own = {}

    def only_own(shape, sharding, callback):
        """Asks for the parts of the devices of these replicas alone."""
        places = sharding.devices_indices_map(shape)
        of_replicas = whole_feed.mesh.devices[:, 0, 2:].flat
        own.update({device: callback(places[device]) for device in of_replicas})
        return dict(own)

    monkeypatch.setattr(jax, "make_array_from_callback", only_own)
    for name, found in whole_feed.put(part, position=100).items():
        assert len(found) == 4
        for shard in want[name].addressable_shards:
            if shard.device in found:
                np.testing.assert_array_equal(found[shard.device], shard.data)


def test_samples_are_numbered_in_the_order_of_the_run():
    of_run, _ = feed()
    ids = np.zeros((4, 8, 32), np.int32)
    numbers = of_run.put({"inputs": ids, "targets": ids}, position=2**31 - 8)["samples"]
    want = (np.arange(32) + 2**31 - 8) % 2**31
    np.testing.assert_array_equal(np.asarray(numbers)[..., 0], want.reshape(4, 8))
    assert "samples" not in of_run.put({"inputs": ids, "targets": ids})


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
