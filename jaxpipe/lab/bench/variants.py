"""Configurations that `bench step` compares, and PyTorch's schedules of the same families."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from jaxpipe.config import Config, ConfigError, RuntimeConfig
from jaxpipe.planning import Devices, OpSeconds, estimate, resolve
from jaxpipe.schedules import find_family

PP = 2  # pipeline ranks
CPUS = Devices("cpu", memory=None)
DEFAULT = (
    "gpipe", "1f1b:in_flight=3", "interleaved_1f1b:v=2,in_flight=5", "zb_h1", "zbv", "dualpipe",
    "dualpipev",
)  # fmt: skip
PEERS = {  # by family; ZB-H1's has two stages per rank, DualPipe's is V-shaped
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe": "ScheduleDualPipeV",
    "dualpipev": "ScheduleDualPipeV",
}
_KEYS = {"v": "virtual_stages", "in_flight": "in_flight", "vocab_parallel": "vocab_parallel_pp"}


def single_config(config: Config, microbatches: int) -> Config:
    """Return the configuration on one device."""
    return _with_parallel(config, microbatches, pp=1, schedule="1f1b")


def data_parallel_config(config: Config, microbatches: int) -> Config:
    """Return the configuration on two data-parallel replicas with half the microbatches each."""
    return _with_parallel(config, microbatches // PP, pp=1, dp=PP, schedule="1f1b")


def schedule_config(
    config: Config, name: str, microbatches: int, costs: Path | None = None
) -> Config:
    """Return the configuration on two pipeline ranks.

    Args:
        config: of the run.
        name: of the schedule, with options: "interleaved_1f1b:v=2,in_flight=5,vocab_parallel".
        microbatches: of a step.
        costs: file of measured op seconds, for searched schedules.
    """
    family, _, options = name.partition(":")
    parallel = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in _KEYS or not (value or "1").isdigit():
            raise ConfigError(f"--schedules {name}: write v=N, in_flight=N or vocab_parallel.")
        parallel[_KEYS[key]] = int(value) if value else True
    return _with_parallel(
        config, microbatches, pp=PP, schedule=find_family(family).name, objective="scan",
        transfer_ticks=1, costs=str(costs or ""), **parallel,
    )  # fmt: skip


def peer_of(name: str) -> str | None:
    """Return PyTorch's schedule class of the family, if it has one."""
    return PEERS.get(name.partition(":")[0])


def peer_stages(peer: str) -> int:
    """Return the number of stages of a schedule class of PyTorch, as `torch_worker` builds them."""
    return PP if peer in ("ScheduleGPipe", "Schedule1F1B") else 2 * PP


def predict_seconds(config: Config, seconds: OpSeconds) -> float:
    """Return the planner's seconds of a step, without the optimizer update."""
    return estimate(resolve(config, CPUS), seconds).seconds


def _with_parallel(config: Config, microbatches: int, **parallel: Any) -> Config:
    """Each rank is a process with one device, whichever devices the configuration names."""
    only = {"dp": 1, "cp": 1, "slices": 1, "tp": 1} | parallel
    train = replace(config.train, grad_accum_steps=microbatches, batch_tokens=0)
    mesh = replace(config.parallel, **only)
    return replace(config, parallel=mesh, train=train, runtime=RuntimeConfig())
