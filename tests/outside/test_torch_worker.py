"""PyTorch's process of `bench step` computes jaxpipe's losses, also where layers run in loops."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxpipe import config as configs
from jaxpipe.lab.bench import worker
from jaxpipe.lab.bench.variants import single_config

pytest.importorskip("torch", reason="torch is not installed")
SMALL = Path(__file__).parents[1] / "data" / "small.toml"


@pytest.mark.parametrize("unroll", [1, 8])
def test_losses_are_those_of_one_device(tmp_path, monkeypatch, unroll):
    monkeypatch.setattr(sys, "path", [str(Path(worker.__file__).parent), *sys.path])
    from torch_worker import TorchWorker

    plain = ["optimizer.clip_norm=0", "optimizer.warmup_steps=0", "model.n_layers=8"]
    config = single_config(
        configs.load(SMALL, [*plain, f"parallel.unroll_layers={unroll}", "model.vocab_size=64"]), 2
    )
    built = msgspec.to_builtins(config)
    ours = worker.BenchWorker()
    ours.export(path=str(tmp_path / "values.npz"), config=built)
    values = np.load(tmp_path / "values.npz")
    assert values["layers/7/attn/wq"].ndim == 2
    want = ours.build(name="single", kind="accumulated", config=built)["losses"]
    got = TorchWorker(0, 1).build("single", None, built, str(tmp_path / "values.npz"))["losses"]
    np.testing.assert_allclose(got, want, rtol=1e-5)
