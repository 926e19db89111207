"""A layer's residuals are read, and its F recomputed, once the gradient at its output is known."""

import pytest
from programs import LAYERS_EACH, find_scan, traced

from jaxpipe.pipeline.jaxpr import dependents


@pytest.mark.parametrize(("name", "remat"), [("1f1b", "full"), ("zb_h1", "selective")])
def test_residuals_are_read_behind_the_layer_after(name, remat):
    """Otherwise XLA may recompute all layers first, and what that computes stays live."""
    body = find_scan(traced(name, 2, 4, remat=remat)[0].jaxpr.jaxpr).params["jaxpr"].jaxpr
    branches = [b.jaxpr for eqn in body.eqns for b in eqn.params.get("branches", ())]
    gradient = max(branches, key=lambda branch: len(branch.eqns))  # BW, or B
    products = [eqn for eqn in gradient.eqns if eqn.primitive.name == "dot_general"]
    first = dependents(gradient, [var for eqn in products for var in eqn.outvars])
    floats = [eqn for eqn in gradient.eqns if eqn.primitive.name == "jit" and is_read(eqn)]
    waiting = [eqn for eqn in floats if first.issuperset(eqn.outvars)]
    assert len(waiting) == (len(floats) - 1) / LAYERS_EACH > 0  # one of all reads dy


def is_read(eqn):
    """Whether the call returns a slot of a ring buffer of residuals."""
    ring, value = eqn.invars[0].aval, eqn.outvars[0].aval
    return value.shape == ring.shape[1:] and len(value.shape) == 3 and value.dtype == "float32"
