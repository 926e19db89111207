"""Traces the costs of a model at the shapes of one device, on an abstract mesh."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import islice
from math import lcm
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from msgspec import structs

from jaxpipe.config import Config
from jaxpipe.core.contract import Context, LayerKind, StageFunctions
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.core.executor.traced_kind import TracedKind, embed_head_of
from jaxpipe.core.mesh import DP, EP, PP, RP, TP, ZERO_AXES
from jaxpipe.core.mesh.flags import is_trained, merge, select
from jaxpipe.core.mesh.sharding import param_specs_of
from jaxpipe.core.split import POLICIES
from jaxpipe.core.split.crossing import RECOMPUTED, Policy
from jaxpipe.core.split.halves import in_halves
from jaxpipe.core.split.split import Cotangent, inexact
from jaxpipe.model.kernels.cudnn_attention import replace_kernels
from jaxpipe.model.layers.moe.balance import REAL
from jaxpipe.model.loss import CHOICES
from jaxpipe.model.neighbours import neighbour_keys
from jaxpipe.planning.cost.costs import LayerCosts, ModelCosts, Parameters, size_of
from jaxpipe.planning.cost.inlining import array_of
from jaxpipe.planning.cost.kernels import Operations
from jaxpipe.planning.cost.liveness import WorkingSet, working_set
from jaxpipe.planning.cost.operations import operations_of
from jaxpipe.planning.cost.sent import collectives_in, sent_bytes
from jaxpipe.planning.model import model_of

Tree = Any


def trace(
    config: Config, *, layers: ModelCosts | None = None, embed_head: ModelCosts | None = None
) -> ModelCosts:
    """Trace the costs of a configuration's model on the smallest mesh with its cp, ep and tp.

    Args:
      config: the settings that costs depend on (`costs.essentials`).
      layers: costs of a configuration whose layers are the same; those that do not read embedding
        and head are not traced again.
      embed_head: costs of a configuration whose embedding and head are the same.
    """
    model, parallel = model_of(config), config.parallel
    functions = in_halves(model.functions, config.halves) if config.halves else model.functions
    order = functions.layer_kinds(config.model.pipeline_layers)
    kinds: dict[str, LayerCosts] = {}
    if layers:
        kinds |= {name: of for name, of in layers.kinds.items() if name not in layers.reads}
    head = (embed_head.head, embed_head.head_bytes) if embed_head else None
    of_embed_head = _parameters(model.init_embed_head, functions.embed_head_specs, of_layer=False)
    of_layers = {
        name: _parameters(
            partial(model.init_layer, index=order.index(name), kind=name),
            functions.kinds_by_name[name].param_specs,
            of_layer=True,
        )
        for name in dict.fromkeys(order)
        if name not in kinds
    }
    costs: list[ModelCosts] = []

    def on_device(
        own: Tree, layers: dict[str, Tree], rows: Tree, read: Tree, index: jax.Array
    ) -> None:
        x = jax.eval_shape(functions.embed, own, rows)
        trained = is_trained(of_embed_head.specs)
        context = Context(rows, index, None, functions.variables, read)
        for name, params in layers.items():
            kind = functions.kinds_by_name[name]
            run = _traced_kind(config, name, kind, params, x, context, trained)
            seen = context._replace(state=run.state, embed_head=embed_head_of(kind, read))
            kinds[name] = _layer_costs(run, params, x, seen, of_layers[name], config)
        of_head = head or _head_costs(functions, trained, own, x, rows)
        in_order = {name: kinds[name] for name in order}
        reads = frozenset(name for name in order if functions.kinds_by_name[name].reads)
        costs.append(ModelCosts(in_order, order, *of_head, _bytes(x), of_embed_head, reads))

    ep = parallel.ep_replicas
    sizes = {PP: parallel.pp, RP: 1, DP: lcm(parallel.cp, ep) // ep, EP: ep, TP: parallel.tp}
    dtype = jnp.dtype(config.train.compute_dtype)
    arguments = (
        _shards(of_embed_head, sizes, dtype),
        {name: _shards(layer, sizes, dtype) for name, layer in of_layers.items()},
        rows_of(config, functions),
        _shards(of_embed_head, sizes | {PP: 1}, dtype),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 5)
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=PartitionSpec(), out_specs=None, check_vma=False
    )
    with replace_kernels():
        jax.eval_shape(run, *arguments)
    return costs[0]


def _parameters(init: Callable[[Any], Tree], specs: Tree, *, of_layer: bool) -> Parameters:
    shapes = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    return Parameters(shapes, param_specs_of(specs, shapes, of_layer=of_layer))


_kinds: dict[tuple[Config, str], TracedKind] = {}  # without remat


def _traced_kind(
    config: Config, name: str, kind: LayerKind, params: Tree, x: Any, context: Context,
    trained: Tree,
) -> TracedKind:  # fmt: skip
    """Return a traced layer kind; policies of remat split one trace of it."""
    key = structs.replace(config, train=structs.replace(config.train, remat="none")), name
    policy, recomputed = policies_of(config)
    if key in _kinds:
        split = _kinds[key].split.under(policy, kind.keep, recomputed)
        return replace(_kinds[key], split_if_trained=split)
    _kinds[key] = TracedKind.trace(
        name, kind, params, x, context, policy, trained, recomputed, halves=config.halves
    )
    return _kinds[key]


def _layer_costs(
    run: TracedKind, params: Tree, x: Any, context: Context, parameters: Parameters,
    config: Config,
) -> LayerCosts:  # fmt: skip
    """Costs of a layer for an average sequence slice, which half of the other slices precede."""
    split, parallel = run.split, config.parallel
    residuals, dlosses = split.residuals, run.output.aux.loss_sums
    dy = Cotangent(x, inexact(run.state), dlosses)
    before = (config.layer_slices - 1) / 2
    # Of every op: its arguments; the places of those that are live, and of those in ring buffers.
    for_r = residuals.for_r
    calls: dict[str, tuple[Callable[..., Tree], tuple[Tree, ...], set[int], set[int]]] = {
        "F": (split.forward, (params, x, context), {1}, set()),
        "B": (split.backward_input, (params, context, residuals, dy), {3}, {2}),
        "W": (
            split.backward_weight,
            (params, context, residuals.for_w, split.stash, dlosses), set(), {2, 3},
        ),
        "BW": (split.backward, (params, context, residuals, dy), {3}, {2}),
    }  # fmt: skip
    if for_r is not None:
        calls["R"] = split.recompute, (params, context, for_r), set(), {2}
    ops, working = {}, {}
    for op, (function, args, live, stored) in calls.items():
        ops[op] = jax.make_jaxpr(function)(*args).jaxpr
        working[op] = working_set(ops[op], *(_inputs(ops[op], args, of) for of in (live, stored)))
    kernels = {"R": Operations()} | {
        op: operations_of(jaxpr, before, adds="W" in op) for op, jaxpr in ops.items()
    }
    both = ops.pop("BW")

    collectives = {op: collectives_in(jaxpr) for op, jaxpr in ops.items()}

    def sent(axes: tuple[str, ...], devices: int, **of: Any) -> dict[str, float]:
        return {"R": 0.0} | {
            op: sent_bytes(every, axes, devices, before, **of) for op, every in collectives.items()
        }

    experts = (EP, TP) if parallel.ep_over_tp else (EP,)
    over_ep, over_cp = sent(experts, parallel.ep), sent(ZERO_AXES, parallel.cp)
    over_tp = sent((TP,), parallel.tp)
    of_ops = ((one.peak, one.sending) for one in working.values())
    peak, sending = map(max, zip(*of_ops))  # BW does what the others do
    sends = any(of["B"] for of in (over_ep, over_cp, over_tp))
    gradients = _bytes([var.aval for var in ops["W"].outvars])
    handed = live_for_w(both, split.handed, gradients, sends=sends)
    working["BW"] = WorkingSet(peak, handed, sending if sends else peak)
    return LayerCosts(
        kernels=kernels,
        exchanged=over_ep,
        spread=sent(experts, parallel.ep, of="spread"),
        shared=over_cp,
        turned=sent(ZERO_AXES, parallel.cp, of="turned"),
        tensor=over_tp,
        calls={
            "exchanged": sent(experts, parallel.ep, of="calls"),
            "shared": sent(ZERO_AXES, parallel.cp, of="calls"),
            "tensor": sent((TP,), parallel.tp, of="calls"),
        },
        waits={
            "for_b": residuals.for_b,
            "for_w": residuals.for_w,
            "for_r": for_r or (),
            "stash": split.stash,
        },
        state=_bytes(run.state),
        working=working,
        parameters=parameters,
    )


def _head_costs(
    functions: StageFunctions, trained: Tree, embed_head: Tree, x: Any, rows: Tree
) -> tuple[Operations, int]:
    """Kernels of the loss with all its gradients, and bytes that it holds beside its inputs."""

    def total(own: Tree, x: Any, rows: Tree) -> jax.Array:
        return functions.head(merge(trained, own, embed_head), x, rows).sum()

    loss_and_gradients = jax.grad(total, argnums=(0, 1), allow_int=True)
    jaxpr = jax.make_jaxpr(loss_and_gradients)(select(trained, embed_head), x, rows).jaxpr
    return operations_of(jaxpr, adds=True), working_set(jaxpr).peak


def live_for_w(both: Jaxpr, handed: Tree, gradients: int, *, sends: bool) -> int:
    """Bytes that a layer's W keeps live while B of the layer before it runs, in BW.

    Where B has collectives, W hides them one layer behind B, so all that W reads is live.
    Elsewhere XLA delays the products of W as long as they write more than they free.

    Args:
      both: BW, in which a barrier ties what B hands to W. Of a gathered value W reads the result,
        and not the shard.
      handed: shapes and dtypes of what B hands to W (`LayerSplit.handed`).
      gradients: bytes of the gradients that W returns.
      sends: whether B has collectives.
    """
    wanted = [(one.shape, one.dtype) for one in handed]
    read = {var for eqn in both.eqns for var in eqn.invars if isinstance(var, Var)}
    stash = 0
    for eqn in both.eqns:
        given = [(one.shape, one.dtype) for one in map(array_of, eqn.outvars)]
        if eqn.primitive.name == "optimization_barrier" and given == wanted:
            stash = _bytes([var.aval for var in eqn.outvars if var in read])
    return stash if sends else min(stash, gradients)


def policies_of(config: Config) -> tuple[Policy, Policy | None]:
    """The arguments `policy` and `recomputed` of `TracedKind.trace` for a configuration."""
    remat = config.train.remat
    return (POLICIES["full"], RECOMPUTED) if remat == "ahead" else (POLICIES[remat], None)


def _inputs(jaxpr: Jaxpr, args: tuple[Tree, ...], places: Collection[int]) -> list[Var]:
    """The variables of a jaxpr for some of the arguments that it was traced with."""
    left = iter(jaxpr.invars)
    of = [list(islice(left, len(jax.tree.leaves(arg)))) for arg in args]
    return [var for place in places for var in of[place]]


def rows_of(config: Config, functions: StageFunctions) -> Tree:
    """Shapes of the batch rows of one microbatch or slice that one device reads."""
    train = config.train
    length = train.seq_len // config.parallel.rows_per_sequence
    ids = jax.ShapeDtypeStruct((train.microbatch_size, length), jnp.int32)
    rows = {"inputs": ids, "targets": ids}
    reads = functions.batch_keys or ()
    if "samples" in reads:
        rows["samples"] = ids
    if config.marks_padding:
        rows[REAL] = ids
    if "segments" in reads:
        rows |= {"segments": ids, "positions": ids}
    rows |= dict.fromkeys(neighbour_keys(config.model), ids)
    for name, dims in config.loss_rows.items():
        dtype = jnp.int32 if name == CHOICES else jnp.float32
        rows[name] = jax.ShapeDtypeStruct((*ids.shape, *dims), dtype)
    if functions.has_slices:
        rows["slice"] = jax.ShapeDtypeStruct((train.microbatch_size,), jnp.int32)
    return rows


def _shards(parameters: Parameters, sizes: dict[str, int], dtype: Any) -> Tree:
    """Shapes of the parameters as the ops of one device read them."""

    def shard(full: Any, leaf: ParamSpec) -> jax.ShapeDtypeStruct:
        shape = list(full.shape)
        for axis, dim in leaf.sharded:
            shape[dim] = -(-shape[dim] // sizes[axis])  # an uneven vocabulary is padded
        return jax.ShapeDtypeStruct(shape, dtype)

    return jax.tree.map(shard, parameters.shapes, parameters.specs)


def _bytes(tree: Tree) -> int:
    return size_of(jax.tree.leaves(tree))
