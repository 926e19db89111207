"""Products in 8-bit floats of a step that is compiled for H100s that are not present."""

import jax
import pytest
from compiling import needs_compiler, report
from test_check import EXPERTS, STEP


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("schedule", "fp8", "mesh", "ops"),
    [
        ("zb_h1", "delayed", "parallel.dp=2", {"F": 7, "B": 7, "W": 7 + 7}),
        ("1f1b", "current", "parallel.tp=2", {"F": 7, "BW": 14}),
    ],
)
def test_layers_multiply_in_8_bits(schedule, fp8, mesh, ops):
    """Every product with a layer's weight, and only these: two layers a stage, seven weights.

    With replicas the last gradient is also computed outside the scan.
    """
    found = report(
        *STEP, "parallel.pp=4", "parallel.dp=1", mesh, f"parallel.schedule={schedule}",
        f"train.fp8={fp8}", "parallel.layer_split=even",
    )  # fmt: skip
    narrow = [one for one in found["products"] if "f8" in one["operands"]]
    assert {one["library"] for one in narrow} == {"__cublas$lt$matmul$f8"}
    forms = {"F": {"f8e4m3fn x f8e4m3fn"}, "B": {"f8e5m2 x f8e4m3fn"}, "W": {"f8e4m3fn x f8e5m2"}}
    forms["BW"] = forms["B"] | forms["W"]
    for op, count in ops.items():
        of_op = [one for one in narrow if one["op"] == op]
        assert sum(one["count"] for one in of_op) == 2 * count
        assert {one["operands"] for one in of_op} == forms[op]
    assert sum(one["count"] for one in narrow) == 2 * sum(ops.values())


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("capacity", "libraries"),
    [
        ("1.0", {"__cublas$lt$matmul$f8"}),
        pytest.param(
            "0.0", {"__cublas$lt$matmul$f8", "mosaic_gpu_v2"},
            marks=pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="no kernel for it"),
        ),
    ],
    ids=["capacity", "dropless"],
)  # fmt: skip
def test_experts_multiply_in_8_bits(capacity, libraries):
    """Three products of all experts at once and attention's four, in F, in B and in W."""
    found = report(
        *EXPERTS, "parallel.schedule=zb_h1", "parallel.dp=2", "parallel.ep=2",
        f"model.capacity_factor={capacity}", "train.fp8=delayed", "train.grad_accum_steps=4",
    )  # fmt: skip
    narrow = [one for one in found["products"] if "f8" in one["operands"]]
    counts = {(one["op"], one["library"]): one["count"] for one in narrow}
    assert {library for _, library in counts} == libraries
    for op, count in {"F": 7, "B": 7, "W": 7 + 7}.items():
        assert sum(counts.get((op, library), 0) for library in libraries) == count
    assert len(counts) == 3 * len(libraries)
    assert ("in 8 bits by a kernel" in (found["note"] or "")) == (len(libraries) == 2)
    assert found["graphs"]["whole"]
