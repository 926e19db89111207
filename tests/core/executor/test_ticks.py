"""The last tick, outside the scan: the same numbers; sums over replicas overlap its gradients."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax.extend.core import Var
from orders import build
from programs import LAYERS_EACH, step_of, traced

from jaxpipe.core.executor import Execution
from jaxpipe.core.executor.ticks import closing_tick
from jaxpipe.core.schedule import Lockstep, lower

SHARED = Lockstep(transfer_ticks=2, vocab_parallel=True)


@pytest.mark.parametrize(("lockstep", "branches"), [(Lockstep(), 1), (SHARED, 1)], ids=str)
def test_a_tick_alone_has_only_the_branches_that_it_takes(lockstep, branches):
    """After the scan comes the embedding's gradient; a head there would compute logits."""
    trace, _ = traced("1f1b", 2, 4, lockstep=lockstep, overlap_sums=True)
    body = step_of(trace.jaxpr.jaxpr)
    conds = sum(eqn.primitive.name == "cond" for eqn in body.eqns)
    assert conds == branches


def test_ticks_after_the_scan_read_the_parameters_that_it_returns():
    """Of what the scan was given XLA would keep a second copy where 8-bit products transpose it."""
    trace, _ = traced("1f1b", 2, 4, overlap_sums=True)
    eqns = step_of(trace.jaxpr.jaxpr).eqns
    (at,) = (place for place, eqn in enumerate(eqns) if eqn.primitive.name == "scan")
    given, read = (
        {var for eqn in some for var in eqn.invars if isinstance(var, Var)}
        for some in ([eqns[at]], eqns[at + 1 :])
    )
    # Only the batch and the tables; and XLA does not see that the scan changes no parameter.
    assert {var.aval.dtype for var in given & read} == {jnp.dtype("int32")}
    body = eqns[at].params["jaxpr"].jaxpr
    barriers = [eqn for eqn in body.eqns if eqn.primitive.name == "optimization_barrier"]
    passed = [eqn for eqn in barriers if {*eqn.outvars} <= {*body.outvars}]
    assert [len(eqn.outvars) for eqn in passed] == [LAYERS_EACH * 4]  # a gain and three matrices


@pytest.mark.parametrize("lockstep", [Lockstep(), SHARED], ids=["end stages", "all ranks"])
def test_the_head_is_reduced_beside_the_closing_tick(lockstep):
    """Its reduction begins before the tick's products, and ends before the embedding's gradient."""
    trace, _ = traced("1f1b", 2, 4, dp=2, lockstep=lockstep, overlap_sums=True)
    eqns = step_of(trace.jaxpr.jaxpr).eqns
    names = [eqn.primitive.name for eqn in eqns]
    shapes = [[var.aval.shape for var in eqn.outvars] for eqn in eqns]
    shard, dx = (4, 11), (2, 6, 8)  # of the head's gradient over pp, and of the activations
    after = names.index("scan")
    started = names.index("psum", after)
    assert shard in shapes[started]
    assert started < names.index("dot_general", after)
    barriers = [at for at in range(after, len(names)) if names[at] == "optimization_barrier"]
    (ended,) = (at for at in barriers if shard in shapes[at])
    assert dx in shapes[ended]
    assert ended < names.index("cond", after)


def test_where_it_is_not_one_gradient_all_ticks_are_scanned():
    how = Execution(overlap_sums=True)
    assert closing_tick(lower(build("dualpipe", pp=2, microbatches=4)), how) is None
    tables = lower(build("1f1b", pp=2, microbatches=4), SHARED)
    assert closing_tick(tables, how) == tables.ticks - 2  # then the embedding's gradient
    assert closing_tick(tables, replace(how, overlap_sums=False)) is None
