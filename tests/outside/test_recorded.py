"""Against recorded results of transformers, torch's autograd and NumPy's updates, on four layouts.

`record_transformers.py` writes the records; `test_live.py` asserts that transformers gives the same
today.
"""

import numpy as np
import pytest
import transformers_records as records
from updates import STEPS

from jaxpipe.core.mesh import ContextParallel
from jaxpipe.planning import Devices

DENSE = ("llama", "qwen3", "gpt2")
LAYOUTS = {
    "one device": {},
    "1f1b": {"pp": 2, "tp": 2, "schedule": "1f1b"},
    "zb_h1, ZeRO 3": {"pp": 2, "dp": 2, "schedule": "zb_h1", "zero_stage": 3},
    "dualpipev, ring": {
        "pp": 2, "dp": 2, "cp": 2, "cp_method": "ring", "schedule": "dualpipev", "tp": 2,
        "sequence_parallel": True,
    },
    "dualpipev, cp": {"pp": 2, "dp": 2, "cp": 2, "schedule": "dualpipev", "tp": 2},
    "dualpipev, ep": {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipev", "tp": 2},
    "interleaved, ep": {"pp": 2, "dp": 2, "ep": 2, "schedule": "interleaved_1f1b", "tp": 2},
}  # fmt: skip
FOURTH = {
    "llama": "dualpipev, ring", "qwen3": "dualpipev, ring", "gpt2": "dualpipev, cp",
    "deepseek_v2": "dualpipev, ring", "deepseek_v3": "dualpipev, ep",
}  # fmt: skip
CASES = [
    (name, layout)
    for name in (*DENSE, "qwen3_moe", "deepseek_v2", "deepseek_v3")
    for layout in (*list(LAYOUTS)[:3], FOURTH.get(name, "interleaved, ep"))
]
RELATIVES = [
    ("qwen2", "1f1b"),
    ("mixtral", "interleaved, ep"),
    ("gemma3", "dualpipev, cp"),
    ("gpt_oss", "interleaved, ep"),
    ("llama4", "interleaved, ep"),
]  # of these models, on one layout


def assert_close(got, want, tolerance):
    """Compare every array by its largest error over its largest value."""
    assert got.keys() == want.keys()
    for path, expected in want.items():
        assert got[path].shape == expected.shape, path
        error = np.abs(got[path] - expected).max() / np.abs(expected).max()
        assert error < tolerance, ("/".join(path), error)


# For the features of the other models, such as tied embeddings, three matrices in one tensor,
# biases or latents, the layout with the most sharding is enough.
UPDATED = [
    (name, layout)
    for name, layout in CASES
    if name in ("llama", "qwen3_moe") or layout == "zb_h1, ZeRO 3"
]
OTHERS = [case for case in CASES if case not in UPDATED]


@pytest.mark.extended
@pytest.mark.slow(unless=["gpt2-*v, cp", "qwen2*", "gemma3*", "gpt_oss*", "*v, ep"])
@pytest.mark.parametrize(("name", "layout"), [*OTHERS, *RELATIVES])
def test_loss_and_every_gradient(name, layout):
    assert_right_gradients(name, LAYOUTS[layout])


@pytest.mark.slow
def test_a_ring_of_permutes(monkeypatch):
    """As GPUs run it; CPUs can if all devices are in the same branch."""
    by_permute = ContextParallel._rotate_by_permute
    monkeypatch.setattr(ContextParallel, "_rotate_by_gather", by_permute)
    assert_right_gradients("llama", {"dp": 4, "cp": 4, "cp_method": "ring", "tp": 2})


@pytest.mark.slow(only=["qwen3_moe-dualpipev, ep"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", "1f1b"), ("qwen3_moe", "dualpipev, ep"), ("qwen3", "zb_h1, ZeRO 3")],
)
def test_what_is_decided_for_gpus_alone(name, layout, monkeypatch):
    """Two-tick messages, paired halves, shared vocabulary, overlapping sums: run on CPUs."""
    monkeypatch.setattr(Devices, "on_cpu", False)
    record, how = records.read(name), LAYOUTS[layout] | {"vocab_parallel_pp": name == "llama"}
    lockstep = records.trainer_of(record, how).execution.lockstep
    assert lockstep.transfer_ticks == 2 or lockstep.phases > 1
    assert not lockstep.synchronizes_all
    assert lockstep.vocab_parallel == (name == "llama")
    assert_right_gradients(name, how, overlap_sums=how.get("dp", 1) > 1)


def assert_right_gradients(name, layout, **execution):
    """In float64: only the order of sums may differ."""
    record = records.read(name)
    loss, gradients = records.loss_and_gradients(record, layout, **execution)
    np.testing.assert_allclose(loss, record.arrays["adamw_losses"][0], rtol=1e-13)
    check_gradients(name, gradients)


def check_gradients(name, gradients):
    record = records.read(name)
    want = record.by_our_names("gradients", records.trainer_of(record, {}).config.model)
    if name == "gpt2":
        gradients, want = without_key_biases(gradients), without_key_biases(want)
    assert all(np.abs(gradient).max() > 1e-3 for gradient in want.values())
    assert_close(gradients, want, 1e-12)


def without_key_biases(gradients):
    """Remove gradients of key biases, which are only rounding where no position turns keys."""
    for path, gradient in gradients.items():
        assert path[-1] != "bk" or np.abs(gradient).max() < 1e-15
    return {path: gradient for path, gradient in gradients.items() if path[-1] != "bk"}


@pytest.mark.extended(unless=["llama-*"])
@pytest.mark.slow(
    unless=["llama-*-adamw", "gpt2-*-adamw", "qwen3-*-adamw", "qwen3_moe-interleaved, ep-muon"]
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("name", "layout"), UPDATED)
def test_gradients_losses_and_parameters_of_three_updates(name, layout, optimizer):
    """In float64; the record has the parameters in float32, whose rounding is 6e-8."""
    record = records.read(name)
    losses, gradients, params = records.trained(record, LAYOUTS[layout], optimizer, STEPS)
    model = records.trainer_of(record, {}).config.model
    np.testing.assert_allclose(losses[0], record.arrays[f"{optimizer}_losses"][0], rtol=1e-13)
    np.testing.assert_allclose(losses, record.arrays[f"{optimizer}_losses"], rtol=1e-11)
    check_gradients(name, gradients)
    assert_close(params, record.by_our_names(optimizer, model), 6e-8)
