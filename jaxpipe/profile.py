"""`python -m jaxpipe.profile CONFIG [section.key=value ...]`: where the time of one step goes.

Trains three steps on random tokens on the present devices and records the last. Writes ticks.json
for Perfetto, with one track per pipeline rank that shows every tick by its label (op, microbatch)
and every exchange, and the profiler's own recording for XProf, whose operations are named by tick
part. Prints the work of each pipeline rank and its bubble: its idle share of the loop over ticks.

Exit codes: 0 done; 1 the recording does not show the ticks; 2 bad input.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxpipe import config as configs
from jaxpipe.config import Config, ConfigError
from jaxpipe.config.arguments import parse, parser_of
from jaxpipe.config.paths import local_path
from jaxpipe.planning import Devices, resolve
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.runtime import command
from jaxpipe.runtime.devices import check_devices
from jaxpipe.runtime.environment import use_cpu_devices, use_gpu_memory
from jaxpipe.schedules.timing.recording import (
    ProfileError,
    RankTicks,
    median_op_seconds,
    rank_bubbles,
    write_trace,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = parser_of("profile", __doc__ or "")
    parser.add_argument(
        "--out", type=local_path, default=Path("profile"), help="directory (profile)"
    )
    return command.run(lambda: _run(parse(parser, argv)), (ProfileError,))


def _run(arguments: argparse.Namespace) -> None:
    config = configs.load(arguments.config, arguments.overrides)
    check_settings(config)
    if config.parallel.pp == 1:
        raise ConfigError("parallel.pp=1 has no ticks to tell apart: profile a pipeline.")
    _print(profile(config, arguments.out))
    print(f"ticks.json (Perfetto) and the recording (XProf) are in {arguments.out}")


def profile(config: Config, out: Path) -> RankTicks:
    """Record one training step and return its ticks by pipeline rank.

    Args:
        config: of the run, with a pipeline.
        out: directory for the profiler's recording and ticks.json.

    Raises:
        ConfigError: the configuration is invalid for these devices, or `out` cannot be written.
        ProfileError: the recording does not show the ticks.
    """
    if config.runtime.cpu_devices:
        use_cpu_devices(config.runtime.cpu_devices)
    use_gpu_memory()
    check_devices()
    import jax

    from jaxpipe.run.measure.bubble import recorded, ticks
    from jaxpipe.training.batch_sharder import random_batch
    from jaxpipe.training.trainer import Trainer

    trainer = Trainer(resolve(config, Devices.present(jax.devices())))
    state, batch = trainer.init(), trainer.put(random_batch(trainer.config))
    for _ in range(2):
        state, _ = jax.block_until_ready(trainer.train_step(state, batch))
    try:
        _, events = recorded(lambda: trainer.train_step(state, batch), out)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error.strerror}).") from error
    ranks = ticks(trainer.pipeline, events)
    write_trace(ranks, out / "ticks.json")
    return ranks


def _print(ranks: RankTicks) -> None:
    console, bubbles = Console(highlight=False), rank_bubbles(ranks)
    table = Table("rank", "ticks with work", "work, s", "exchanges and waits, s", "bubble")
    for rank, ticks in ranks.items():
        busy = [tick for tick in ticks if tick.cell.actions]
        work = sum(tick.end - tick.compute_begin for tick in busy)
        exchanges = sum(tick.compute_begin - tick.begin for tick in ticks)
        table.add_row(
            str(rank), f"{len(busy)} of {len(ticks)}", f"{work:.4f}", f"{exchanges:.4f}",
            f"{bubbles[rank]:.1%}",
        )  # fmt: skip
    console.print(table)
    ops = Table("op", "stage", "median, ms", title="ops that had a tick to themselves")
    for (op, stage), seconds in median_op_seconds(ranks).items():
        ops.add_row(op.name, str(stage), f"{1e3 * seconds:.3f}")
    console.print(ops)


if __name__ == "__main__":
    sys.exit(main())
