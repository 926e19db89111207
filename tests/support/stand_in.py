"""A stand-in for `python -m jaxpipe.train` under Slurm: no jax, the same files and exit codes.

A step takes 50 ms. Task 0 exits a second after the others. In that second a signal has its default
effect, as in a trainer that is about to exit.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(words: list[str]) -> int:
    """Run steps until the last one or a signal, and return the exit code."""
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    if settings["parallel.pp"] == "9":
        sys.stderr.write("error: parallel.pp=9\n")
        return 2
    time.sleep(float(settings.get("seconds_to_start", 0)))
    received: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    run, is_first = Path(settings["run.dir"]), os.environ["SLURM_PROCID"] == "0"
    every = int(settings["checkpoint.every"])
    step = newest(run)
    if is_first:
        run.joinpath("checkpoints").mkdir(parents=True, exist_ok=True)
        keep_metrics(run / "metrics.jsonl", step)
        tell(f"resumed from step {step}" if step else "loss")
    while step < int(settings["train.steps"]) and not received:
        time.sleep(0.05)
        step += 1
        if is_first:
            with (run / "metrics.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": 1 / step}) + "\n")
            if every and step % every == 0:
                save(run, step)
    if is_first:
        save(run, step)
        if received:
            tell(f"stopped after step {step}")
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(1)
    return 128 + received[0] if received else 0


def tell(line: str) -> None:
    """Write a line to the log at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def newest(run: Path) -> int:
    """Return the step of the newest checkpoint, or 0."""
    return max((int(path.name) for path in run.glob("checkpoints/*")), default=0)


def save(run: Path, step: int) -> None:
    """Write a checkpoint, unless this step has one."""
    run.joinpath("checkpoints", str(step)).mkdir(exist_ok=True)


def keep_metrics(path: Path, last: int) -> None:
    """Drop the lines of steps after `last`."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(line for line in lines[:last] if line.endswith("\n")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
