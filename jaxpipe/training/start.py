"""The state that a run begins with: its newest checkpoint's, another run's, or a fresh one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxpipe import config as configs
from jaxpipe.checkpoint import Checkpoints, DamagedError, Exclusion, newest, read_state
from jaxpipe.checkpoint.compatibility import check_same_settings
from jaxpipe.config import Config, ConfigError, ParallelConfig
from jaxpipe.data.sources import Data
from jaxpipe.planning.checks import filled
from jaxpipe.training.guard import Guard
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Say = Callable[[str], None]
Check = Callable[[Path, dict[str, Any]], None]


class Seen(NamedTuple):
    """How far a run has come in its training data."""

    samples: int = 0
    tokens: int = 0  # without padding


def start(trainer: Trainer, data: Data, checkpoints: Checkpoints, say: Say) -> tuple[State, Seen]:
    """The state to go on from, and what it has seen of the data.

    Raises `ConfigError` for checkpoints that do not belong to this run's model or data, and where
    all checkpoints are damaged: a run that had any never begins anew by itself.
    """
    resume = trainer.config.checkpoint.resume
    if resume == "none" and checkpoints.steps:
        raise ConfigError(
            f"{checkpoints.directory} holds checkpoints of steps {checkpoints.steps} but "
            f"checkpoint.resume='none': use resume='auto' to continue, or another run.dir."
        )
    shapes = trainer.state_shapes
    check = partial(check_same_settings, config=trainer.config, with_moments=True)
    if found := checkpoints.restore(shapes.parts(), say, check):
        restored, meta = found
        return _resumed(trainer, restored, meta, data, say)
    if resume != "none" and checkpoints.damaged:
        raise ConfigError(
            f"{checkpoints.directory} holds no checkpoint but "
            f"{', '.join(path.name for path in checkpoints.damaged)}: set checkpoint.resume=none "
            f"to begin anew, or use another run.dir."
        )
    if resume in ("auto", "none"):
        return trainer.init(), Seen()
    path, patterns = newest(Path(resume)), trainer.config.checkpoint.exclude
    but = f", but {', '.join(patterns)} new" if patterns else ""
    if trainer.config.checkpoint.parameters_only:
        exclusion = Exclusion(patterns, lambda: {"params": trainer.init_parameters()})
        check = partial(check_same_settings, config=trainer.config, with_moments=False)
        like = {"params": shapes.params}
        restored, meta = _read(path, checkpoints, like, exclusion, say, check)
        say(f"started with the parameters of {path} (step {meta['step']}){but}")
        return trainer.fresh(restored["params"]), Seen()
    exclusion = Exclusion(patterns, lambda: trainer.init().parts())
    restored, meta = _read(path, checkpoints, shapes.parts(), exclusion, say, check)
    return _resumed(trainer, restored, meta, data, say, but)


def describe(trainer: Trainer, data: Data, seen: Seen, guard: Guard) -> dict[str, Any]:
    """What is stored beside a state: where the data stands, and what it was trained with."""
    parallel = trainer.config.parallel
    return {
        "position": seen.samples,
        "tokens": seen.tokens,
        "guard": guard.saved(),
        "data": data.train.fingerprint,
        "layout": f"{parallel.mesh} {parallel.schedule}",
        "config": configs.to_toml(trainer.config),
    }


def on_one_device(config: Config) -> Config:
    """The same run on a single device: its initial state is that of every other mesh."""
    alone = msgspec.structs.replace(config, parallel=ParallelConfig(schedule="gpipe"))
    return filled(alone, 1)


def _resumed(
    trainer: Trainer,
    parts: dict[str, Any],
    meta: dict[str, Any],
    data: Data,
    say: Say,
    but: str = "",
) -> tuple[State, Seen]:
    if not data.train.has(meta["data"]):
        raise ConfigError(
            f"checkpoint {meta['step']} was trained on {meta['data']} but this run reads "
            f"{data.train.fingerprint}: give the same [data], train.seq_len and train.seed, "
            f"another run.dir, or take only its parameters (checkpoint.parameters_only)."
        )
    say(f"resumed from step {meta['step']} (saved with {meta['layout']}){but}")
    known, has = trainer.state_shapes.variables, parts.get("variables") or {}
    if new := sorted(known.keys() - has.keys()) if isinstance(known, dict) else []:
        say(f"the checkpoint has no {', '.join(new)} of this model: begun anew")
    position = meta["position"]
    tokens = meta.get("tokens", position * trainer.config.train.seq_len)  # older ones: no padding
    return trainer.state_of(parts, meta.get("guard", {})), Seen(position, tokens)


def _read(
    path: Path, checkpoints: Checkpoints, like: Any, exclusion: Exclusion, say: Say, check: Check
) -> tuple[Any, dict[str, Any]]:
    """A checkpoint that is not this run's own, so that it stays where it is if it is damaged."""
    try:
        return read_state(path, checkpoints.keying, like, exclusion, say, check)
    except DamagedError as error:
        raise ConfigError(
            f"checkpoint {path} is damaged ({error}): give another as checkpoint.resume."
        ) from error
