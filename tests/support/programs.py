"""The toy model's step, traced and compiled, for tests that look at the program."""

from math import prod

import jax
from orders import near
from toy import TOY, toy_batch, toy_params

from jaxpipe.core.executor import Execution, Pipeline
from jaxpipe.core.mesh import StageLayout, make_mesh
from jaxpipe.core.schedule import Op
from jaxpipe.core.schedule.lockstep import PLAIN

LAYERS_EACH = 2  # layers of each stage


def traced(
    name, pp, microbatches, *, build=near, dp=1, examples=4, lockstep=PLAIN, remat="none",
    **execution,
):  # fmt: skip
    """Return the trace of one schedule's step, and the schedule."""
    schedule = build(name, pp, microbatches)
    layout = StageLayout((LAYERS_EACH,) * schedule.stages, schedule.placement)
    shared, layers = toy_params(0, layout.layers)
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    batch = toy_batch(1, microbatches, examples)
    mesh = make_mesh(pp, dp, devices=jax.devices()[: pp * dp])
    pipeline = Pipeline(TOY, schedule, mesh, execution=Execution(lockstep, remat, **execution))
    return jax.jit(pipeline.losses_and_gradients).trace(params, batch), schedule


def compiled(*args, **kwargs):
    return traced(*args, **kwargs)[0].lower().compile()


def dot_flops(jaxpr, count_cond):
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * prod(eqn.outvars[0].aval.shape) * prod(left[axis] for axis in contract)
        elif eqn.primitive.name == "ragged_dot_general":
            total += 2 * prod(eqn.invars[0].aval.shape) * eqn.outvars[0].aval.shape[-1]
        elif eqn.primitive.name == "cond":
            total += count_cond(eqn)
        else:
            bodies = [p for p in eqn.params.values() if hasattr(p, "jaxpr") or hasattr(p, "eqns")]
            times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            total += times * sum(dot_flops(getattr(b, "jaxpr", b), count_cond) for b in bodies)
    return total


def find_scan(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            return eqn
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns") and (found := find_scan(inner)):
                return found
    return None


def step_of(jaxpr):
    """Return the program of one pipeline rank: the jaxpr that contains the scan."""
    if any(eqn.primitive.name == "scan" for eqn in jaxpr.eqns):
        return jaxpr
    bodies = (getattr(param, "jaxpr", param) for eqn in jaxpr.eqns for param in eqn.params.values())
    found = (step_of(body) for body in bodies if hasattr(body, "eqns"))
    return next(filter(None, found), None)


def executed_flops(trace, tables, rank):
    """Return the matmul FLOPs that one rank's conds really execute in one step."""
    body = find_scan(trace.jaxpr.jaxpr).params["jaxpr"].jaxpr
    conds = [eqn for eqn in body.eqns if eqn.primitive.name == "cond"]
    row = jax.tree.map(lambda column: column[:, rank], tables.columns)
    runs = []
    if row.vocab_parallel:
        runs += [which > 0 for which in row.vocab_parallel.head]
        for returned, which in zip(row.vocab_parallel.embed_gradient, row.vocab_parallel.embed):
            runs += [returned > 0, which > 0]
    runs += [row.pair == index + 1 for index in range(len(tables.pairs))]
    runs += [row.chunk_column(Op.F) == chunk + 1 for chunk in tables.forwards]
    if not row.vocab_parallel:
        runs += [row.head]
    runs += [row.chunk_column(op) == chunk + 1 for op, chunk in tables.gradients]
    if tables.slots.head:
        runs += [row.head_weight]
    if not row.vocab_parallel:
        runs += [row.embed_gradient]
    assert len(conds) == len(runs)

    def larger_branch(eqn):
        return max(dot_flops(branch.jaxpr, larger_branch) for branch in eqn.params["branches"])

    return sum(larger_branch(eqn) * int(ran.sum()) for ran, eqn in zip(runs, conds))


def eqns_of(jaxpr, inside=False):
    """Yield every equation, and whether it is in a loop."""
    for eqn in jaxpr.eqns:
        yield eqn, inside
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                inner = getattr(value, "jaxpr", value)
                yield from eqns_of(inner, inside or eqn.primitive.name == "scan")


def is_jaxpr(value):
    return hasattr(getattr(value, "jaxpr", value), "eqns")
