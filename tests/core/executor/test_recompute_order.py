"""A layer is recomputed beside the B of the layer after it, and stores while the next one runs."""

import pytest
from programs import LAYERS_EACH, find_scan, traced

from jaxpipe.core.split.jaxpr import dependents, variables_in


@pytest.mark.parametrize(("name", "remat"), [("1f1b", "full"), ("zb_h1", "selective")])
def test_residuals_wait_for_the_layer_after(name, remat):
    """Otherwise XLA may recompute all layers first, and what that computes stays live."""
    body = find_scan(traced(name, 2, 4, remat=remat)[0].jaxpr.jaxpr).params["jaxpr"].jaxpr
    branches = [b.jaxpr for eqn in body.eqns for b in eqn.params.get("branches", ())]
    gradient = max(branches, key=lambda branch: len(branch.eqns))  # BW, or B
    ties = [eqn for eqn in gradient.eqns if eqn.primitive.name == "optimization_barrier"]
    starts = [var for eqn in ties for var in eqn.outvars if var.aval.shape == ()]
    after_dy = dependents(gradient, starts)
    reads = [eqn for eqn in gradient.eqns if eqn.primitive.name == "jit" and is_read(eqn)]
    waiting = [eqn for eqn in reads if after_dy.issuperset(eqn.outvars)]
    assert len(waiting) == (len(reads) - 1) / LAYERS_EACH > 0  # one of all reads dy


@pytest.mark.parametrize(("branch", "op"), [(0, "F"), (1, "B")])
def test_residuals_are_written_while_the_next_layer_runs(branch, op):
    """Otherwise XLA on GPU may write them when the action ends, and hold those of all layers."""
    body = find_scan(traced("zb_h1", 2, 4)[0].jaxpr.jaxpr).params["jaxpr"].jaxpr
    branches = [b.jaxpr for eqn in body.eqns for b in eqn.params.get("branches", ())]
    writing = [one for one in branches if count_writes(one) >= LAYERS_EACH]
    acting = writing[branch]
    ties = [eqn for eqn in acting.eqns if eqn.primitive.name == "optimization_barrier"]
    written = {eqn.outvars[0] for eqn in acting.eqns if is_write(eqn)}
    after = [eqn for eqn in ties if not written.isdisjoint(variables_in(eqn))]
    assert len(after) == LAYERS_EACH - 1, op


def count_writes(branch):
    return sum(map(is_write, branch.eqns))


def is_write(eqn):
    """Whether the equation or call returns a ring buffer of activations with a new value."""
    name, first = eqn.primitive.name, eqn.outvars[0].aval
    return name in ("jit", "dynamic_update_slice") and len(first.shape) == 4


def is_read(eqn):
    """Whether the call returns a slot of a ring buffer of activations."""
    ring, value = eqn.invars[0].aval, eqn.outvars[0].aval
    return value.shape == ring.shape[1:] and len(value.shape) == 3 and value.dtype == "float32"
