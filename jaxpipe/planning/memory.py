"""Bytes on one device: the largest rank's, since one program sizes every rank's buffers alike."""

from dataclasses import asdict, dataclass

from jaxpipe.analysis import (
    embedding_parameters,
    head_parameters,
    hidden_bytes,
    layer_bytes,
    layer_parameters,
)
from jaxpipe.config import Config
from jaxpipe.planning.candidates import Candidate
from jaxpipe.planning.hardware import ITEMSIZE
from jaxpipe.schedule import Tables

_FLOAT32 = 4


@dataclass(frozen=True)
class RankBytes:
    """Where the bytes of a device go.

    `parameters`: float32 values; layers of the rank, and its share of embedding and head.
    `optimizer`: two moments of each. `gradients`: float32 sums, of embedding and head whole.
    `copies`: layers and whole ends in the compute dtype, which the ops read; a bidirectional
    schedule has two stages of layers. `activations`: what waits for B or W, and the messages that
    wait. `head`: logits and their gradient in float32, while the head runs.
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
    pp, tp = parallel.pp, parallel.tp
    item = ITEMSIZE[train.compute_dtype]
    sizes = {"batch": train.microbatch_size, "seq_len": train.seq_len, "tp": tp}
    slots = max(layers)  # every stage has room for as many
    chunks = schedule.stages // pp
    layer = slots * chunks * layer_parameters(model, tp)
    ends = embedding_parameters(model, tp) + head_parameters(model, tp)
    parameters = layer + _share_of_ends(config)
    mirrored = schedule.placement.mirrored_from is not None
    stored = layer_bytes(model, itemsize=item, remat=train.remat, **sizes)
    held = tables.slots
    rings = held.for_b * stored.for_b + held.for_w * stored.for_w + held.stash * stored.stash
    both_ways = len(tables.lanes) * (tables.transfer_ticks == 2)
    messages = held.inbox + 1 + 2 + both_ways  # waiting; made last; on their way
    waits = held.head + held.embed + bool(held.embed)  # what deferred gradients of the ends take
    logits = train.microbatch_size * train.seq_len * model.vocab_size // tp
    hidden = hidden_bytes(model, itemsize=item, **sizes)
    return RankBytes(
        parameters=_FLOAT32 * parameters,
        optimizer=2 * _FLOAT32 * parameters,
        gradients=_FLOAT32 * (layer * (1 + mirrored) + ends),
        copies=item * (layer * mirrored + (0 if item == _FLOAT32 else layer + ends)),
        activations=slots * rings + (messages + waits) * hidden + held.head * logits * item,
        head=2 * _FLOAT32 * logits,
    )


def _share_of_ends(config: Config) -> int:
    """Values of embedding, final norm and head on one rank: cut along an axis that pp divides."""
    model, pp = config.model, config.parallel.pp
    vocabulary = embedding_parameters(model, config.parallel.tp)
    matrices = 1 if model.tie_embeddings else 2
    rows = vocabulary // model.d_model
    cut = rows % pp == 0 or model.d_model % pp == 0
    norm = model.d_model // (pp if model.d_model % pp == 0 else 1)
    return matrices * (vocabulary // pp if cut else vocabulary) + norm
