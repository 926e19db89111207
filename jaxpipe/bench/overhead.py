"""`bench overhead`: what a tick costs beside its work, on virtual CPU devices of this machine.

Steps of a model that has next to nothing to compute, with few and with many microbatches: the
difference of their times over the difference of their ticks. That counts the exchanges, the conds
and the scan of a tick, and how threads wait for each other, without what a step costs once. Beside
it stands what the two exchanges take in a scan of nothing else.
"""

import argparse
from statistics import median

import msgspec

from jaxpipe.bench.options import at_least_one
from jaxpipe.bench.processes import seconds_of
from jaxpipe.config import Config, ConfigError, ParallelConfig, TrainConfig
from jaxpipe.model.llama.config import LlamaConfig
from jaxpipe.runtime.environment import use_cpu_devices

_ASKED = 300e-6  # seconds of a tick beside its work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--ranks", type=int, default=8, help="of the pipeline, a device each (8)")
    add("--schedule", default="1f1b", help="any of the library's (1f1b)")
    add("--steps", type=int, default=20, help="steps, of which the median counts (20)")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    ranks = arguments.ranks
    at_least_one(steps=arguments.steps)
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks} must be at least 2.")
    use_cpu_devices(ranks)
    few, many = (_config(arguments.schedule, ranks, count * ranks) for count in (2, 8))
    from jaxpipe.bench.ops import TransferTimer
    from jaxpipe.bench.worker import grid_of, trainer_of

    trainers = [trainer_of(msgspec.to_builtins(config)) for config in (few, many)]
    ticks = [len(grid_of(trainer)) for trainer in trainers]
    exchange = TransferTimer(trainers[0], ticks=300)
    seconds = [_seconds(config, arguments.steps) for config in (few, many)]
    each = (seconds[1] - seconds[0]) / (ticks[1] - ticks[0])
    alone = median(exchange.seconds() for _ in range(arguments.steps))
    print(
        f"{arguments.schedule}, {ranks} ranks: {ticks[0]} ticks in {1e3 * seconds[0]:.2f} ms, "
        f"{ticks[1]} in {1e3 * seconds[1]:.2f} ms: {1e6 * each:.0f} us a tick; "
        f"two exchanges alone: {1e6 * alone:.0f} us"
    )
    if each > _ASKED:
        print(
            f"asked: {1e6 * _ASKED:.0f} us a tick, which this misses by {each / _ASKED:.2f} times"
        )


def _config(schedule: str, ranks: int, microbatches: int) -> Config:
    return Config(
        model=LlamaConfig(
            n_layers=2 * ranks, d_model=8, n_heads=1, n_kv_heads=1, d_ff=8, vocab_size=8
        ),
        parallel=ParallelConfig(pp=ranks, schedule=schedule),
        train=TrainConfig(steps=1, grad_accum_steps=microbatches, microbatch_size=1, seq_len=8),
    )


def _seconds(config: Config, steps: int) -> float:
    from jaxpipe.bench.worker import Worker

    worker = Worker()
    worker.build("step", "trained", msgspec.to_builtins(config))
    return median(seconds_of([worker.step("step")]) for _ in range(steps))
