"""Bytes on one device: the largest rank's, since one program sizes every rank's buffers alike."""

from dataclasses import asdict, dataclass
from typing import NamedTuple

from jaxpipe.analysis import end_leaves, hidden_bytes, layer_bytes, layer_leaves, state_bytes
from jaxpipe.config import Config
from jaxpipe.partition.leaf import DP, PP, TP, cutting
from jaxpipe.planning.candidates import Candidate
from jaxpipe.planning.hardware import ITEMSIZE, device_sizes
from jaxpipe.schedule import Schedule, Tables

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
    """

    parameters: int
    optimizer: int
    gradients: int
    copies: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


def rank_bytes(config: Config, candidate: Candidate, tables: Tables) -> RankBytes:
    """Bytes of a device under one of the schedules of a configuration, lowered to `tables`."""
    schedule, layers = candidate.schedule, candidate.layers
    model, train, parallel = config.model, config.train, config.parallel
    item = ITEMSIZE[train.compute_dtype]
    sizes = device_sizes(config) | {"sequence_parallel": parallel.sequence_parallel}
    slots = max(layers)  # every stage has room for as many
    held_slots = slots * (schedule.stages // parallel.pp)
    mirrored = schedule.placement.mirrored_from is not None
    layer, end = _values(config, of_layer=True), _values(config, of_layer=False)
    sums = layer.part if parallel.reshard_after_forward else layer.whole
    parameters = held_slots * layer.part + end.part
    cast = item != _FLOAT32
    if parallel.reshard_after_forward:
        read = held_slots * layer.part * (cast + mirrored) + layer.whole
    else:
        read = held_slots * layer.whole * ((cast or layer.whole != layer.part) + mirrored)
    if cast or end.whole != end.part:
        read += end.whole
    stored = layer_bytes(model, itemsize=item, remat=train.remat, **sizes)
    of_sequences = state_bytes(
        model, batch=train.microbatch_size, seq_len=train.seq_len, itemsize=item, tp=parallel.tp
    )
    held = tables.slots
    rings = held.for_b * stored.for_b + held.for_w * stored.for_w + held.stash * stored.stash
    rings += (held.state + held.dstate) * of_sequences
    both_ways = len(tables.lanes) * (tables.lockstep.transfer_ticks == 2)
    messages = held.inbox + 1 + 2 + both_ways  # waiting; made last; on their way
    waits = held.head + held.embed + bool(held.embed)  # what deferred gradients of the ends take
    rows = train.microbatch_size * train.seq_len // (parallel.slices * parallel.sdp)
    rows //= train.loss_chunks
    vocabulary = model.vocab_size // parallel.tp
    if parallel.vocab_parallel_pp:
        vocabulary //= parallel.pp
    logits, matrix = rows * vocabulary, model.d_model * vocabulary
    hidden = hidden_bytes(model, itemsize=item, **sizes)
    return RankBytes(
        parameters=_FLOAT32 * parameters,
        optimizer=_FLOAT32 * (held_slots * layer.moments + end.moments),
        gradients=_FLOAT32 * (held_slots * sums * (1 + mirrored) + end.whole),
        copies=item * read,
        activations=slots * rings + (messages + waits) * hidden + held.head * logits * item,
        head=_FLOAT32 * (2 * logits + matrix * (train.loss_chunks > 1)),
    )


def mirrored_bytes(config: Config, schedule: Schedule, layers: tuple[int, ...]) -> int:
    """Bytes that a rank of a bidirectional schedule sends a step for its second copy of a stage.

    The parameters go out in the compute dtype, the sums of gradients come home in float32.
    """
    if schedule.placement.mirrored_from is None:
        return 0
    layer = _values(config, of_layer=True)
    values = layer.part if config.parallel.reshard_after_forward else layer.whole
    slots = max(layers) * (schedule.stages // config.parallel.pp)
    return slots * values * (ITEMSIZE[config.train.compute_dtype] + _FLOAT32)


class _Values(NamedTuple):
    """Values on one device: of what is stored, of that put together over pp and dp, of moments."""

    part: int
    whole: int
    moments: int


def _values(config: Config, *, of_layer: bool) -> _Values:
    """Of the parameters of one layer, or of those that no layer has."""
    parallel = config.parallel
    mesh = {"pp": parallel.pp, "dp": parallel.dp, "tp": parallel.tp}
    part = whole = moments = 0
    if of_layer:
        leaves = layer_leaves(config.model, parallel.tp)
    else:
        leaves = end_leaves(config.model, (TP, PP) if parallel.vocab_parallel_pp else (TP,))
    for leaf in leaves.values():
        shape = (parallel.pp, *leaf.shape) if of_layer else leaf.shape
        how = cutting(shape, leaf, mesh, of_layer=of_layer, zero_stage=parallel.zero_stage)
        stored = how.part_size(shape, mesh)
        part += stored
        moments += stored * _moments(config.optimizer.name, of_layer and leaf.matrix is not None)
        parted = of_layer or PP in leaf.parted
        whole += how.part_size(shape, mesh, whole=(DP,) if parted else (PP, DP))
    return _Values(part, whole, moments)


def _moments(optimizer: str, matrix: bool) -> int:
    """How many moments a value has; `matrix`: is it one of a layer's matrices?"""
    return 1 if optimizer == "lion" or (optimizer == "muon" and matrix) else 2
