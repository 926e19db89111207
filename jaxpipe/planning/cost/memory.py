"""Bytes on one device: the largest rank's, since one program sizes all ranks' buffers alike."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from jaxpipe.config import Config
from jaxpipe.core.schedule import Op, Placement, ScanBuffers
from jaxpipe.planning.cost.costs import (
    ITEMSIZE,
    LayerCosts,
    ModelCosts,
    costs_of,
    ring_costs,
    size_of,
)
from jaxpipe.planning.cost.state_sizes import FLOAT32, StoredValues, stored_values

if TYPE_CHECKING:
    from jaxpipe.core.mesh import StageLayout


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a device by purpose.

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
      working: what the cell that holds most computes with beside all these: an action of a layer or
        the head, by liveness over its equations (`liveness.py`).
      host: bytes in its host's memory, not on the device: residuals (`train.offload_layers`) and
        moments (`train.offload_moments`).
      kept: with `train.fused_steps` the reduced gradients of a step that is not yet validated; and
        parameters, moments and gradients of the full embedding and head, which every rank has.
    """

    parameters: int
    optimizer: int
    gradients: int
    copies: int
    activations: int
    working: int
    host: int = 0
    kept: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device, which excludes `host`."""
        return sum(asdict(self).values()) - self.host


def rank_bytes(config: Config, layout: "StageLayout", buffers: ScanBuffers | None) -> RankBytes:
    """Return the bytes of a device under a schedule with these stages, in the scan.

    With None for `buffers`, activations count as 0, and the working set is that of the head or of
    an op of one layer: no order has less.
    """
    train, parallel = config.train, config.parallel
    item, costs = ITEMSIZE[train.compute_dtype], costs_of(config)
    mirrored = layout.mirrored
    by_kind, (embed_head, frozen_embed_head) = stored_values(config)
    kinds = [(count, by_kind[kind]) for kind, count in Counter(layout.slot_kinds).items()]
    trained, frozen = (
        StoredValues(*map(sum, zip(*([count * n for n in both[part]] for count, both in kinds))))
        for part in range(2)
    )
    sums = trained.shard if parallel.reshards else trained.full
    overlaps = train.fused_steps > 1 and not mirrored
    cast = item != FLOAT32 or overlaps  # parameters that change in a program are copied for ops
    read = (embed_head.full if cast else embed_head.gathered) + frozen_embed_head.gathered
    of_layers = bool(costs.reads and parallel.vocab_shared_by)
    read += of_layers * (embed_head.of_layers + frozen_embed_head.of_layers)
    if parallel.reshards:
        ahead = min(2, max(map(len, layout.chunk_kinds)))  # a layer, and the next, gathered ahead
        read += ahead * max(sum(part.gathered for part in kind) for kind in by_kind.values())
        read += trained.shard * (cast + mirrored) + frozen.shard * mirrored
    else:
        read += (trained.full if cast else trained.gathered) + trained.full * mirrored
        read += frozen.gathered + frozen.full * mirrored
    logits = logits_of(config)
    activations = host = 0
    if buffers is not None:
        rings = _rings(config, layout, buffers)
        activations = rings.device + _messages(costs, buffers) + buffers.slots.head * logits * item
        host = rings.host
    moments = trained.moments + embed_head.moments
    return RankBytes(
        parameters=FLOAT32 * (trained.shard + embed_head.shard)
        + item * (frozen.shard + frozen_embed_head.shard),
        optimizer=0 if train.offload_moments else moments,
        gradients=FLOAT32
        * (sums * (1 + mirrored) + embed_head.full + of_layers * embed_head.of_layers),
        copies=item * read,
        activations=activations,
        working=_working(config, layout, buffers),
        host=host + train.offload_moments * moments,
        kept=overlaps * (FLOAT32 * trained.shard + embed_head.of_rank + frozen_embed_head.of_rank),
    )


def logits_of(config: Config) -> int:
    """Number of logits that a device computes at once, of a microbatch, slice or loss chunk."""
    train, parallel = config.train, config.parallel
    tokens = train.microbatch_size * train.seq_len // parallel.rows_per_sequence
    vocabulary = -(-config.model.vocab_size // (parallel.tp * (parallel.vocab_shared_by or 1)))
    return tokens // train.loss_chunks * vocabulary


def _working(config: Config, layout: "StageLayout", buffers: ScanBuffers | None) -> int:
    """Bytes of the cell that holds most, beside what is stored.

    XLA may write the results of a layer to ring buffers while the next layer runs, but no later
    (`core/executor/chunk.py`). In BW, where B has collectives, W runs one layer behind B, and what
    B recomputes one layer ahead of it, so a neighbour's stash is live beside a layer's B: that of
    the layer behind until B's last collective, which hides its W. Elsewhere XLA delays the products
    of W as long as they write more than they free. Of a pair, F ends with the B of as many layers,
    beside which the W of layers before may run.
    """
    costs = costs_of(config)
    if buffers is None:
        kinds = [costs.kinds[kind].working for kind in {*layout.slot_kinds}]
        return max(costs.head_bytes, *(kind[op].peak for kind in kinds for op in "FBW"))
    of_rings = ring_costs(config, layout)

    def of_chunk(op: str, rings: Sequence[int]) -> int:
        layers = [of_rings[ring].working[op] for ring in rings]
        results = 0, *(layer.results for layer in layers), 0
        beside = [layer.sending if op == "BW" else layer.peak for layer in layers]
        around = zip(layers, beside, results, results[2:])
        return max(
            max(layer.peak + before, until + after) for layer, until, before, after in around
        )

    def largest(op: str) -> int:
        chunks = map(layout.ring_slots_of, range(len(layout.chunk_kinds)))
        return max(of_chunk(op, rings) for rings in chunks if rings)

    alone = max(map(len, layout.chunk_kinds)) == 1
    pairs = [largest("F") + largest("B" if alone else pair.op.name) for pair in buffers.pairs]
    ops = {op.name for op in buffers.ops if op is not Op.U}
    return max(costs.head_bytes, *map(largest, ops), *pairs)


def _messages(costs: ModelCosts, buffers: ScanBuffers) -> int:
    """Bytes of messages that are queued or in transit."""
    slots = buffers.slots
    both_ways = len(buffers.lanes) * (buffers.lockstep.transfer_ticks == 2)
    messages = slots.inbox + 1 + 2 + both_ways  # queued; computed last; in transit
    waits = slots.head + slots.embed + bool(slots.embed)  # for deferred gradients of embed_head
    return (messages + waits) * costs.message


class RingBytes(NamedTuple):
    """Bytes of ring buffers on a device, and in its host's memory."""

    device: int
    host: int


def _rings(config: Config, layout: "StageLayout", buffers: ScanBuffers) -> RingBytes:
    """Bytes of the ring buffers of a rank's layers, on the device and on its host."""
    away, slots = layout.first_ring_slots(config.train.offload_layers), buffers.slots
    every, device, host = ring_costs(config, layout), 0, 0
    kinds = {id(kind): kind for kind in every}
    alike = Counter((id(kind), ring in away) for ring, kind in enumerate(every))
    for (number, on_host), count in alike.items():
        kind = kinds[number]
        ring = ring_bytes(kind, buffers, on_host=on_host)
        device += count * (ring.device + (slots.state + slots.dstate) * kind.state)
        host += count * ring.host
    return RingBytes(device, host)


def ring_bytes(kind: LayerCosts, buffers: ScanBuffers, *, on_host: bool = False) -> RingBytes:
    """Bytes of the ring buffers of one layer's residuals and W stash, as long as any rank needs.

    `on_host`: whether its residuals are offloaded.
    """
    from jaxpipe.core.executor.ring_buffers import ring_lengths, values_by_use
    from jaxpipe.core.split.crossing import Residuals

    waits = kind.waits
    residuals = Residuals(waits["for_b"], waits["for_w"], waits["for_r"])
    separate = bool(buffers.pairs) or on_host
    with_residuals, stash = (
        sum(length * size_of([value])
            for value, length in ring_lengths(uses, buffers.rank_slots).items())
        for uses in values_by_use(residuals, waits["stash"], separate=separate)
    )  # fmt: skip
    return RingBytes(stash, with_residuals) if on_host else RingBytes(with_residuals + stash, 0)


def layout_of(config: Config, placement: Placement, layers: tuple[int, ...]) -> "StageLayout":
    """Return the stage layout of a configuration's layers under a placement."""
    return _layout(layers, placement, costs_of(config).order, config.train.remat_layers)


@lru_cache(maxsize=512)  # candidates of a search have few
def _layout(
    layers: tuple[int, ...], placement: Placement, order: tuple[str, ...], remat_layers: int
) -> "StageLayout":
    from jaxpipe.core.mesh import StageLayout

    return StageLayout(layers, placement, order, remat_layers=remat_layers)
