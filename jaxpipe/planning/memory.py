"""Bytes on one device: the largest rank's, since one program sizes every rank's buffers alike."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxpipe.config import Config
from jaxpipe.partition.leaf import PP, SHARDS, cutting
from jaxpipe.planning.costs import LayerCosts, ModelCosts, Parameter, costs_of, size_of
from jaxpipe.planning.hardware import ITEMSIZE
from jaxpipe.schedule import Placement, Tables

if TYPE_CHECKING:
    from jaxpipe.parallel import StageLayout

_FLOAT32 = 4


@dataclass(frozen=True)
class RankBytes:
    """Where the bytes of a device go.

    `parameters`: float32 values; layers of the rank, and its share of embedding and head, of both
    only a part from ZeRO stage 1 on. `optimizer`: the moments of each. `gradients`: float32 sums,
    of layers in parts if they are gathered anew for every action, of embedding and head whole
    unless all ranks share the vocabulary. `copies`: what the ops read, in the compute dtype and
    gathered; a bidirectional schedule has two stages of layers. `activations`: what waits for B, W
    or the next slice, and the messages that wait. `head`: logits and their gradient in float32, of
    a chunk and with the gradient of the head's matrix if there are chunks, while the head runs.
    `host`: what waits in its host's memory, not on the device: residuals (`train.offload_layers`),
    moments (`train.offload_moments`). `kept`: with `train.fused_steps` a second state, beside that
    before the steps; in it every rank has embedding and head whole.
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
        """Bytes of all that is on the device."""
        return sum(asdict(self).values()) - self.host


def rank_bytes(config: Config, layout: "StageLayout", tables: Tables | None) -> RankBytes:
    """Bytes of a device under a schedule of such stages, lowered to `tables`.

    With None in their place activations count nothing: what is left is the same for every order.
    """
    train, parallel = config.train, config.parallel
    item, costs = ITEMSIZE[train.compute_dtype], costs_of(config)
    mirrored = layout.mirrored
    by_kind = {name: _values(config, costs, name) for name in costs.kinds}
    held = _Values(*map(sum, zip(*(by_kind[kind] for kind in layout.slot_kinds))))
    end = _values(config, costs)
    sums = held.part if parallel.reshards else held.whole
    overlaps = train.fused_steps > 1 and not mirrored
    cast = item != _FLOAT32 or overlaps  # what changes in a program is copied where ops read it
    if parallel.reshards:
        ahead = min(2, max(map(len, layout.chunk_kinds)))  # a layer, and the one that follows
        gathered = ahead * max(values.whole for values in by_kind.values())
        read = held.part * (cast + mirrored) + gathered
    else:
        read = held.whole * ((cast or held.whole != held.part) + mirrored)
    if cast or end.whole != end.part:
        read += end.whole
    logits, matrix = logits_of(config), config.model.d_model * _vocabulary(config)
    activations = host = 0
    if tables is not None:
        rings = _rings(costs, layout, tables, train.offload_layers)
        activations = rings.device + _messages(costs, tables) + tables.slots.head * logits * item
        host = rings.host
    moments = _FLOAT32 * (held.moments + end.moments)
    return RankBytes(
        parameters=_FLOAT32 * (held.part + end.part),
        optimizer=0 if train.offload_moments else moments,
        gradients=_FLOAT32 * (sums * (1 + mirrored) + end.whole),
        copies=item * read,
        activations=activations,
        head=_FLOAT32 * (2 * logits + matrix * (train.loss_chunks > 1)),
        host=host + train.offload_moments * moments,
        kept=_FLOAT32 * overlaps * (held.part + held.moments + end.of_rank),
    )


def logits_of(config: Config) -> int:
    """Logits that a device makes at once: of a microbatch or slice, or of a chunk of its loss."""
    parallel, train = config.parallel, config.train
    rows = train.microbatch_size * train.seq_len // (parallel.slices * parallel.cp)
    return rows // train.loss_chunks * _vocabulary(config)


def _vocabulary(config: Config) -> int:
    """Words of the vocabulary that a device has, padding included."""
    parallel = config.parallel
    return -(-config.model.vocab_size // (parallel.tp * (parallel.ends_shared_by or 1)))


def _messages(costs: ModelCosts, tables: Tables) -> int:
    """Bytes of messages that wait or are on their way."""
    held = tables.slots
    both_ways = len(tables.lanes) * (tables.lockstep.transfer_ticks == 2)
    messages = held.inbox + 1 + 2 + both_ways  # waiting; made last; on their way
    waits = held.head + held.embed + bool(held.embed)  # what deferred gradients of the ends take
    return (messages + waits) * costs.message


class RingBytes(NamedTuple):
    """Bytes of rings on a device, and in its host's memory."""

    device: int
    host: int


def _rings(costs: ModelCosts, layout: "StageLayout", tables: Tables, offloaded: int) -> RingBytes:
    """Those of a rank's layers, of which so many of every stage are offloaded."""
    away, held = layout.first_rings(offloaded), tables.slots
    kinds = [costs.kinds[kind] for kind in layout.ring_kinds]
    rings = [ring_bytes(kind, tables, on_host=ring in away) for ring, kind in enumerate(kinds)]
    states = sum((held.state + held.dstate) * kind.state for kind in kinds)
    return RingBytes(sum(ring.device for ring in rings) + states, sum(ring.host for ring in rings))


def ring_bytes(kind: LayerCosts, tables: Tables, *, on_host: bool = False) -> RingBytes:
    """Those of one layer's residuals and stash, as long as the neediest rank's.

    `on_host`: its residuals are offloaded.
    """
    from jaxpipe.pipeline.cut import Residuals
    from jaxpipe.pipeline.rings import sharing
    from jaxpipe.pipeline.store import ring_lengths

    waits = kind.waits
    kept = Residuals(waits["for_b"], waits["for_w"])
    with_residuals, rest = (
        sum(length * size_of([value])
            for value, length in ring_lengths(uses, tables.slots_of).items())
        for uses in sharing(kept, waits["stash"], apart=bool(tables.pairs) or on_host)
    )  # fmt: skip
    return RingBytes(rest, with_residuals) if on_host else RingBytes(with_residuals + rest, 0)


def mirrored_bytes(config: Config, layout: "StageLayout") -> int:
    """Bytes that a rank of a bidirectional schedule sends a step for its second copy of a stage.

    The parameters go out in the compute dtype, the sums of gradients come home in float32.
    """
    if not layout.mirrored:
        return 0
    costs = costs_of(config)
    values = [_values(config, costs, kind) for kind in layout.slot_kinds]
    sent = sum(kind.part if config.parallel.reshards else kind.whole for kind in values)
    return sent * (ITEMSIZE[config.train.compute_dtype] + _FLOAT32)


def layout_of(config: Config, placement: Placement, layers: tuple[int, ...]) -> "StageLayout":
    """Where the layers of stages are that live there."""
    from jaxpipe.parallel import StageLayout

    return StageLayout(layers, placement, costs_of(config).order)


class _Values(NamedTuple):
    """Values on one device: of what is stored, of that put together over pp and dp, of moments.

    `of_rank` are those of parameter and moments put together over pp alone.
    """

    part: int
    whole: int
    moments: int
    of_rank: int


def _values(config: Config, costs: ModelCosts, kind: str | None = None) -> _Values:
    """Of the parameters of one layer of a kind, or of those that no layer has."""
    of_layer = kind is not None
    parameters = costs.kinds[kind].parameters if kind is not None else costs.ends
    every = [_values_of(config, parameter, of_layer=of_layer) for parameter in parameters]
    return _Values(*map(sum, zip(*every)))


def _values_of(config: Config, parameter: Parameter, *, of_layer: bool) -> _Values:
    parallel, leaf = config.parallel, parameter.leaf
    shards = parallel.dp // (parallel.dp_replicate * parallel.ep)
    mesh = {"pp": parallel.pp, "dp": shards, "ep": parallel.ep, "tp": parallel.tp}
    shape = (parallel.pp, *parameter.shape) if of_layer else parameter.shape
    how = cutting(shape, leaf, mesh, of_layer=of_layer, zero_stage=parallel.zero_stage)
    stored = how.part_size(shape, mesh)
    ranks = () if of_layer else (PP,)
    gathered = tuple(axis for axis in (*SHARDS, *ranks) if axis not in leaf.parted)
    moments = _moments(config.optimizer.name, of_layer and leaf.matrix is not None)
    return _Values(
        part=stored,
        whole=how.part_size(shape, mesh, whole=gathered),
        moments=stored * moments,
        of_rank=how.part_size(shape, mesh, whole=ranks) * (1 + moments),
    )


def _moments(optimizer: str, matrix: bool) -> int:
    """How many moments a value has; `matrix`: is it one of a layer's matrices?"""
    return 1 if optimizer == "lion" or (optimizer == "muon" and matrix) else 2
