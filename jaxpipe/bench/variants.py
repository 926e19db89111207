"""Competitors of `bench step`: jaxpipe's schedules and PyTorch's of the same family."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from jaxpipe.config import Config, RuntimeConfig
from jaxpipe.planning import Devices, OpSeconds, estimate, resolve

PP = 2  # pipeline ranks
CPUS = Devices("cpu", memory=None)
_ALONE = {"dp": 1, "cp": 1, "slices": 1, "tp": 1}  # pipeline parallelism only


@dataclass(frozen=True)
class MeasuredVariant:
    """A schedule to measure.

    Attributes:
        peer: PyTorch's schedule class of the same family.
        parallel: keys of `[parallel]`.
    """

    peer: str
    parallel: dict[str, Any] = field(default_factory=dict)

    def config(self, config: Config, microbatches: int, costs: Path | None = None) -> Config:
        """Return the configuration with this schedule on two ranks.

        Args:
            config: of the run.
            microbatches: of a step.
            costs: file of measured op seconds, for searched schedules.
        """
        parallel = msgspec.structs.replace(
            config.parallel, pp=PP, **_ALONE, objective="scan", transfer_ticks=1,
            costs=str(costs or ""), **self.parallel,
        )  # fmt: skip
        return _with_parallel(config, microbatches, parallel)


_INTERLEAVED = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
_SHARED = {"vocab_parallel_pp": True}
VARIANTS = {
    "gpipe": MeasuredVariant("ScheduleGPipe", {"schedule": "gpipe"}),
    "1f1b": MeasuredVariant("Schedule1F1B", {"schedule": "1f1b"}),
    "1f1b:in_flight=3": MeasuredVariant("Schedule1F1B", {"schedule": "1f1b", "in_flight": 3}),
    "interleaved_1f1b:v=2": MeasuredVariant("ScheduleInterleaved1F1B", _INTERLEAVED),
    "interleaved_1f1b:v=2,in_flight=5": MeasuredVariant(
        "ScheduleInterleaved1F1B", {**_INTERLEAVED, "in_flight": 5}
    ),
    "zb_h1": MeasuredVariant("ScheduleInterleavedZeroBubble", {"schedule": "zb_h1"}),
    "zbv": MeasuredVariant("ScheduleZBVZeroBubble", {"schedule": "zbv"}),
    "dualpipe": MeasuredVariant("ScheduleDualPipeV", {"schedule": "dualpipe"}),
    "dualpipev": MeasuredVariant("ScheduleDualPipeV", {"schedule": "dualpipev"}),
    "1f1b:in_flight=4,vocab_parallel": MeasuredVariant(
        "Schedule1F1B", {"schedule": "1f1b", "in_flight": 4, **_SHARED}
    ),
    "interleaved_1f1b:v=2,in_flight=6,vocab_parallel": MeasuredVariant(
        "ScheduleInterleaved1F1B", {**_INTERLEAVED, "in_flight": 6, **_SHARED}
    ),
    "interleaved_1f1b:v=4,in_flight=10,vocab_parallel": MeasuredVariant(
        "ScheduleInterleaved1F1B", {**_INTERLEAVED, "virtual_stages": 4, "in_flight": 10, **_SHARED}
    ),
    "zbv:vocab_parallel": MeasuredVariant("ScheduleZBVZeroBubble", {"schedule": "zbv", **_SHARED}),
}
DEFAULT = (
    "gpipe", "1f1b:in_flight=3", "interleaved_1f1b:v=2,in_flight=5", "zb_h1", "zbv", "dualpipe",
    "dualpipev",
)  # fmt: skip


def single_config(config: Config, microbatches: int) -> Config:
    """Return the configuration on one device."""
    parallel = msgspec.structs.replace(config.parallel, pp=1, **_ALONE, schedule="1f1b")
    return _with_parallel(config, microbatches, parallel)


def data_parallel_config(config: Config, microbatches: int) -> Config:
    """Return the configuration on two data-parallel replicas with half the microbatches each."""
    parallel = msgspec.structs.replace(
        config.parallel, pp=1, **_ALONE | {"dp": PP}, schedule="1f1b"
    )
    return _with_parallel(config, microbatches // PP, parallel)


def predict_seconds(config: Config, seconds: OpSeconds) -> float:
    """Return the planner's seconds of a step, without the optimizer update."""
    return estimate(resolve(config, CPUS), seconds).seconds


def _with_parallel(config: Config, microbatches: int, parallel: Any) -> Config:
    """Each rank is a process with one device, whichever devices the configuration names."""
    train = msgspec.structs.replace(config.train, grad_accum_steps=microbatches, batch_tokens=0)
    return msgspec.structs.replace(config, parallel=parallel, train=train, runtime=RuntimeConfig())
