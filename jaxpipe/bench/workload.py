"""What is measured: the sizes of a model, and the schedules with their peers in PyTorch."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from jaxpipe.config import ModelConfig
from jaxpipe.schedule import Costs, Schedule, assign_layers, build


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder in float32 and the size of a microbatch."""

    model: ModelConfig
    seq_len: int  # tokens
    microbatch_size: int  # sequences


WORKLOADS = {
    "bench-S": Workload(
        ModelConfig(
            n_layers=8, d_model=512, n_heads=8, n_kv_heads=4, d_ff=1408, vocab_size=4096
        ),
        seq_len=256,
        microbatch_size=2,
    ),
    "tiny": Workload(
        ModelConfig(n_layers=4, d_model=32, n_heads=4, n_kv_heads=2, d_ff=48, vocab_size=64),
        seq_len=16,
        microbatch_size=1,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A schedule as it is run, and PyTorch's class of the same family."""

    name: str
    peer: str
    options: tuple[tuple[str, Any], ...] = ()
    in_flight: int | None = None
    searched: bool = False  # does the order depend on the costs?
    stages_per_rank: int = 1
    vocab_parallel: bool = False

    def build(self, pp: int, microbatches: int, costs: Costs | None = None) -> Schedule:
        """The schedule; `costs` (per stage) steer a searched one, for the lockstep it will run."""
        options = dict(self.options)
        if self.searched:
            options |= {"costs": costs, "objective": "lockstep", "transfer_ticks": 1}
        return build(self.name, pp=pp, microbatches=microbatches, **options)

    def costs(self, times: "OpTimes", layers: int, pp: int, *, split: bool) -> Costs:
        """Costs of its stages in a model of so many layers."""
        shared_by = pp if self.vocab_parallel else 0
        return times.costs(self.layers(layers, pp), split=split, shared_by=shared_by)

    def layers(self, layers: int, pp: int) -> tuple[int, ...]:
        """Layers of every stage."""
        return tuple(assign_layers(layers, pp * self.stages_per_rank, "even"))


VARIANTS = {
    "1f1b": Variant("1f1b", "Schedule1F1B"),
    "1f1b:in_flight=3": Variant("1f1b", "Schedule1F1B", in_flight=3),
    "interleaved_1f1b:v=2": Variant(
        "interleaved_1f1b",
        "ScheduleInterleaved1F1B",
        (("virtual_stages", 2),),
        stages_per_rank=2,
    ),
    "interleaved_1f1b:v=2,in_flight=5": Variant(
        "interleaved_1f1b",
        "ScheduleInterleaved1F1B",
        (("virtual_stages", 2),),
        in_flight=5,
        stages_per_rank=2,
    ),
    "1f1b:in_flight=4,vocab_parallel": Variant(
        "1f1b", "Schedule1F1B", in_flight=4, vocab_parallel=True
    ),
    "interleaved_1f1b:v=2,in_flight=6,vocab_parallel": Variant(
        "interleaved_1f1b",
        "ScheduleInterleaved1F1B",
        (("virtual_stages", 2),),
        in_flight=6,
        stages_per_rank=2,
        vocab_parallel=True,
    ),
    "zbv:vocab_parallel": Variant(
        "zbv", "ScheduleZBVZeroBubble", searched=True, stages_per_rank=2, vocab_parallel=True
    ),
    "zb_h1": Variant("zb_h1", "ScheduleInterleavedZeroBubble"),
    "zbv": Variant("zbv", "ScheduleZBVZeroBubble", searched=True, stages_per_rank=2),
    "dualpipe": Variant("dualpipe", "ScheduleDualPipeV"),
    "dualpipev": Variant("dualpipev", "ScheduleDualPipeV", stages_per_rank=2),
}


class OpTimes(msgspec.Struct, frozen=True):
    """Seconds of one microbatch: of a layer, of both ends, and of a tick's exchange.

    `head` is the loss with its gradients, `embed_gradient` the embedding's share of B; `transfer`
    a message to each of the two neighbours at once, as every tick sends them.
    """

    F: float
    B: float
    W: float
    BW: float
    head: float
    embed: float
    embed_gradient: float
    transfer: float

    def costs(self, layers: tuple[int, ...], *, split: bool, shared_by: int = 0) -> Costs:
        """Costs of stages with so many layers, the head in the last F, the embedding in the first.

        Where gradients are not split, B + W is the measured BW. `shared_by`: so many ranks share
        both ends, here in equal parts of all F, and sum four messages for it, each taken for one
        exchange.
        """
        if shared_by:
            return self._shared(layers, split=split, ranks=shared_by)
        rest = [0.0] * (len(layers) - 2)
        first, last = [self.embed, *rest, 0.0], [0.0, *rest, self.head]
        into_embedding = [self.embed_gradient, *rest, 0.0]
        b, w = (self.B, self.W) if split else (self.BW / 2, self.BW / 2)
        return Costs(
            F=tuple(n * self.F + f + h for n, f, h in zip(layers, first, last)),
            B=tuple(n * b + e for n, e in zip(layers, into_embedding)),
            W=tuple(n * w for n in layers),
            transfer=self.transfer,
        )

    def _shared(self, layers: tuple[int, ...], *, split: bool, ranks: int) -> Costs:
        ends = self.head + self.embed + self.embed_gradient
        of_stage = (ends + 4 * ranks * self.transfer) / len(layers)
        alone = msgspec.structs.replace(self, head=0.0, embed=0.0, embed_gradient=0.0)
        costs = alone.costs(layers, split=split)
        return replace(costs, F=tuple(time + of_stage for time in costs.F))
