"""Bytes on one device: the largest rank's, since one program sizes all ranks' buffers alike."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpipe.config import Config, OptimizerConfig
from jaxpipe.partition.leaf import DP, EP, PP, RP, TP, ZERO_AXES, ShardingPlan
from jaxpipe.planning.costs import LayerCosts, ModelCosts, costs_of, essentials, size_of
from jaxpipe.planning.hardware import ITEMSIZE
from jaxpipe.schedule import Placement, Tables

if TYPE_CHECKING:
    from jaxpipe.parallel import StageLayout

_FLOAT32 = 4
Axes = tuple[str, ...]
Part = Callable[[Any], Any]  # a stage-stacked tree to the subtree of a layer, or of embed_head


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a device, by what they are for.

    Attributes:
      parameters: values of the rank's layers, and of its shard of embedding and head; both sharded
        over replicas from ZeRO stage 1 on. Trained ones are float32, frozen ones in the compute
        dtype.
      optimizer: what the optimizer keeps of the trained parameters, without its counters.
      gradients: float32 sums, of trained parameters alone. Layers' are sharded if layers are
        all-gathered for every action; those of embedding and head are full unless they are
        vocabulary-parallel over pp, and then full once more if layers read them.
      copies: what the ops read, in the compute dtype and all-gathered; a bidirectional schedule has
        two stages of layers.
      activations: values that are live for B, W or the next sequence slice, and queued messages.
      head: logits and their gradient in float32 while the head runs; with loss chunks those of a
        chunk, and the gradient of the head's matrix.
      host: bytes in its host's memory, not on the device: residuals (`train.offload_layers`) and
        moments (`train.offload_moments`).
      kept: with `train.fused_steps` a second state, next to the state before the steps; every rank
        has full embedding and head in it.
    """

    parameters: int
    optimizer: int
    gradients: int
    copies: int
    activations: int
    head: int
    host: int = 0
    kept: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device, which excludes `host`."""
        return sum(asdict(self).values()) - self.host


def rank_bytes(config: Config, layout: "StageLayout", tables: Tables | None) -> RankBytes:
    """Return the bytes of a device under a schedule with these stages, lowered to `tables`.

    With None for `tables`, activations count as 0: the other bytes are the same for every order.
    """
    train, parallel = config.train, config.parallel
    item, costs = ITEMSIZE[train.compute_dtype], costs_of(config)
    mirrored = layout.mirrored
    by_kind, (end, frozen_end) = _values(config)
    kinds = [by_kind[kind] for kind in layout.slot_kinds]
    held, frozen = (_Values(*map(sum, zip(*values))) for values in zip(*kinds))
    sums = held.part if parallel.reshards else held.whole
    overlaps = train.fused_steps > 1 and not mirrored
    cast = item != _FLOAT32 or overlaps  # parameters that change in a program are copied for ops
    read = end.whole * (cast or end.whole != end.part)
    read += frozen_end.whole * (frozen_end.whole != frozen_end.part)
    of_layers = bool(costs.reads and parallel.ends_shared_by)
    read += of_layers * (end.of_layers + frozen_end.of_layers)
    if parallel.reshards:
        ahead = min(2, max(map(len, layout.chunk_kinds)))  # a layer, and the next, gathered ahead
        read += ahead * max(sum(part.whole for part in kind) for kind in by_kind.values())
        read += held.part * (cast + mirrored) + frozen.part * mirrored
    else:
        read += held.whole * ((cast or held.whole != held.part) + mirrored)
        read += frozen.whole * ((frozen.whole != frozen.part) + mirrored)
    logits, matrix = logits_of(config), config.model.d_model * _vocabulary(config)
    activations = host = 0
    if tables is not None:
        rings = _rings(costs, layout, tables, train.offload_layers)
        activations = rings.device + _messages(costs, tables) + tables.slots.head * logits * item
        host = rings.host
    moments = held.moments + end.moments
    return RankBytes(
        parameters=_FLOAT32 * (held.part + end.part) + item * (frozen.part + frozen_end.part),
        optimizer=0 if train.offload_moments else moments,
        gradients=_FLOAT32 * (sums * (1 + mirrored) + end.whole + of_layers * end.of_layers),
        copies=item * read,
        activations=activations,
        head=_FLOAT32 * (2 * logits + matrix * (train.loss_chunks > 1)),
        host=host + train.offload_moments * moments,
        kept=overlaps * (held.of_rank + end.of_rank + frozen.of_rank + frozen_end.of_rank),
    )


def logits_of(config: Config) -> int:
    """Number of logits that a device computes at once, of a microbatch, slice or loss chunk."""
    train = config.train
    tokens = train.microbatch_size * train.seq_len // config.parallel.rows_per_sequence
    return tokens // train.loss_chunks * _vocabulary(config)


def _vocabulary(config: Config) -> int:
    """Vocabulary entries on a device, padding included."""
    parallel = config.parallel
    return -(-config.model.vocab_size // (parallel.tp * (parallel.ends_shared_by or 1)))


def _messages(costs: ModelCosts, tables: Tables) -> int:
    """Bytes of messages that are queued or in transit."""
    held = tables.slots
    both_ways = len(tables.lanes) * (tables.lockstep.transfer_ticks == 2)
    messages = held.inbox + 1 + 2 + both_ways  # queued; computed last; in transit
    waits = held.head + held.embed + bool(held.embed)  # for deferred gradients of embed_head
    return (messages + waits) * costs.message


class RingBytes(NamedTuple):
    """Bytes of ring buffers on a device, and in its host's memory."""

    device: int
    host: int


def _rings(costs: ModelCosts, layout: "StageLayout", tables: Tables, offloaded: int) -> RingBytes:
    """Bytes of the ring buffers of a rank's layers; of every stage `offloaded` are on the host."""
    away, held = layout.first_ring_slots(offloaded), tables.slots
    kinds = [costs.kinds[kind] for kind in layout.ring_slot_kinds]
    rings = [ring_bytes(kind, tables, on_host=ring in away) for ring, kind in enumerate(kinds)]
    states = sum((held.state + held.dstate) * kind.state for kind in kinds)
    return RingBytes(sum(ring.device for ring in rings) + states, sum(ring.host for ring in rings))


def ring_bytes(kind: LayerCosts, tables: Tables, *, on_host: bool = False) -> RingBytes:
    """Bytes of the ring buffers of one layer's residuals and W stash, as long as any rank needs.

    `on_host`: whether its residuals are offloaded.
    """
    from jaxpipe.pipeline.cut import Residuals
    from jaxpipe.pipeline.rings import values_by_use
    from jaxpipe.pipeline.store import ring_lengths

    waits = kind.waits
    residuals = Residuals(waits["for_b"], waits["for_w"])
    with_residuals, rest = (
        sum(length * size_of([value])
            for value, length in ring_lengths(uses, tables.rank_slots).items())
        for uses in values_by_use(residuals, waits["stash"], separate=bool(tables.pairs) or on_host)
    )  # fmt: skip
    return RingBytes(rest, with_residuals) if on_host else RingBytes(with_residuals + rest, 0)


def mirrored_bytes(config: Config, layout: "StageLayout") -> int:
    """Bytes that a rank of a bidirectional schedule sends per step for its second copy of a stage.

    Parameters are sent in the compute dtype, and the sums of their gradients return in float32.
    """
    if not layout.mirrored:
        return 0
    by_kind, _ = _values(config)

    def sent(values: _Values) -> int:
        return values.part if config.parallel.reshards else values.whole

    item = ITEMSIZE[config.train.compute_dtype]
    return sum(
        item * (sent(trained) + sent(frozen)) + _FLOAT32 * sent(trained)
        for trained, frozen in (by_kind[kind] for kind in layout.slot_kinds)
    )


def layout_of(config: Config, placement: Placement, layers: tuple[int, ...]) -> "StageLayout":
    """Return the stage layout of a configuration's layers under a placement."""
    from jaxpipe.parallel import StageLayout

    return StageLayout(layers, placement, costs_of(config).order)


class _Values(NamedTuple):
    """What one device stores of a layer of some kind, or of embedding, final norm and head.

    Attributes:
      part: number of values of the stored parameters.
      whole: parameters as ops read them: all-gathered over replicas, embed_head also over pp.
      of_layers: parameters as layers read them, those of embed_head all-gathered over pp even where
        embedding and head are vocabulary-parallel.
      moments: bytes of the optimizer's moments.
      of_rank: bytes of parameters and moments, those of embed_head all-gathered over pp.
    """

    part: int
    whole: int
    of_layers: int
    moments: int
    of_rank: int


TrainedAndFrozen = tuple[_Values, _Values]


def _values(config: Config) -> tuple[dict[str, TrainedAndFrozen], TrainedAndFrozen]:
    """What one device stores of a layer of each kind, and of embed_head."""
    parallel = config.parallel
    shards = parallel.dp // (parallel.dp_replicate * parallel.ep)
    sizes = parallel.pp, parallel.dp_replicate, shards, parallel.ep, parallel.tp
    return _values_on(essentials(config), config.optimizer, sizes, parallel.zero_stage)


@lru_cache(maxsize=256)  # candidates differ in their schedules alone
def _values_on(
    model: Config, optimizer: OptimizerConfig, sizes: tuple[int, ...], zero_stage: int
) -> tuple[dict[str, TrainedAndFrozen], TrainedAndFrozen]:
    """`_values` on a mesh of these sizes. Moments are what the optimizer's `init` returns.

    Arrays of an optimizer that belong to no parameter, such as a count, are left out.
    """
    import jax  # imported here: planning imports no jax

    from jaxpipe.optimizer import build
    from jaxpipe.parallel import Sharding, is_stage_stacked

    costs = costs_of(model)
    kinds = [kind.parameters for kind in costs.kinds.values()]
    mesh = jax.sharding.AbstractMesh(sizes, (PP, RP, DP, EP, TP))
    sharding = Sharding(mesh, costs.ends.specs, lambda slot: kinds[slot].specs, zero_stage)
    stack = lambda leaf: jax.ShapeDtypeStruct((sizes[0], *leaf.shape), leaf.dtype)  # noqa: E731
    layers = tuple(jax.tree.map(stack, kind.shapes) for kind in kinds)
    params = {"embed_head": costs.ends.shapes, "layers": layers}
    params = jax.eval_shape(sharding.pad, params)
    state = jax.eval_shape(build(optimizer, 1, sharding.param_shardings).init, params)
    state = [
        tree for tree in jax.tree.leaves(state, is_leaf=is_stage_stacked) if is_stage_stacked(tree)
    ]

    def values(part: Part, ranks: Axes, trained: bool) -> _Values:
        def held(tree: Any, gathered: Axes = (), always: Axes = (), unit: int = 0) -> int:
            """Bytes of the part on a device, gathered over some axes; `unit`: of a value."""
            leaves, stored = jax.tree.leaves(part(tree)), part(sharding.param_shardings(tree))
            return sum(
                (unit or leaf.dtype.itemsize)
                * ShardingPlan(how.dim_axes, how.padding).shard_size(
                    how.unpadded_shape(leaf.shape), mesh.shape,
                    gathered=(*always, *(a for a in gathered if a not in how.param.sharded_axes)),
                )
                for leaf, how in zip(leaves, jax.tree.leaves(stored))
                if how.param.trained == trained
            )  # fmt: skip

        item = _FLOAT32 if trained else ITEMSIZE[model.train.compute_dtype]
        return _Values(
            part=held(params, unit=1),
            whole=held(params, (*ZERO_AXES, *ranks), unit=1),
            of_layers=held(params, ZERO_AXES, always=ranks, unit=1),
            moments=sum(held(tree) for tree in state),
            of_rank=held(params, ranks, unit=item) + sum(held(tree, ranks) for tree in state),
        )

    def both(part: Part, ranks: Axes = ()) -> TrainedAndFrozen:
        return values(part, ranks, trained=True), values(part, ranks, trained=False)

    by_kind = {
        name: both(lambda tree, slot=slot: tree["layers"][slot])
        for slot, name in enumerate(costs.kinds)
    }
    return by_kind, both(lambda tree: tree["embed_head"], (PP,))
