"""The state that a run begins with: its newest checkpoint's, another run's, or a fresh one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxpipe import config as configs
from jaxpipe.checkpoint import Checkpoints, DamagedError, Exclusion, newest, read_state
from jaxpipe.checkpoint.compatibility import check_same_settings
from jaxpipe.checkpoint.serving import TOKENIZER, ServingFiles
from jaxpipe.config import Config, ConfigError, DataConfig, ParallelConfig
from jaxpipe.data.manifest import read_manifest
from jaxpipe.data.opening import prepared_folders
from jaxpipe.data.sources import Data
from jaxpipe.planning.checks import filled
from jaxpipe.training.guard import Guard
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Say = Callable[[str], None]
Check = Callable[[Path, dict[str, Any]], None]


class Seen(NamedTuple):
    """How far a run has come in its training data."""

    samples: int = 0  # of the whole run
    tokens: int = 0  # of the whole run, without padding
    restarted_at: int = 0  # samples that the run had seen when it went over to its present data

    @property
    def position(self) -> int:
        """Samples of the present data that it has seen, which is the number of the next one."""
        return self.samples - self.restarted_at


def start(trainer: Trainer, data: Data, checkpoints: Checkpoints, say: Say) -> tuple[State, Seen]:
    """The state to go on from, and what it has seen of the data.

    The checkpoints carry on what the one that the run begins with knows of its tokenizer, and that
    of the data. Raises `ConfigError` for checkpoints that do not belong to this run's model or
    data, and where all checkpoints are damaged: a run that had any never begins anew by itself.
    """
    state, seen, meta = _started(trainer, data, checkpoints, say)
    serving = _ending_as(trainer.config.data, ServingFiles.from_meta(meta))
    checkpoints.carried = serving.as_meta()
    return state, seen


def _started(
    trainer: Trainer, data: Data, checkpoints: Checkpoints, say: Say
) -> tuple[State, Seen, dict[str, Any]]:
    """State, position in the data, and the metadata of the checkpoint that they come from."""
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
        return *_resumed(trainer, restored, meta, data, say), meta
    if resume != "none" and checkpoints.damaged:
        raise ConfigError(
            f"{checkpoints.directory} holds no checkpoint but "
            f"{', '.join(path.name for path in checkpoints.damaged)}: set checkpoint.resume=none "
            f"to begin anew, or use another run.dir."
        )
    if resume in ("auto", "none"):
        return trainer.init(), Seen(), {}
    path, patterns = newest(Path(resume)), trainer.config.checkpoint.exclude
    but = f", but {', '.join(patterns)} new" if patterns else ""
    if trainer.config.checkpoint.parameters_only:
        exclusion = Exclusion(patterns, lambda: {"params": trainer.init_parameters()})
        check = partial(check_same_settings, config=trainer.config, with_moments=False)
        like = {"params": shapes.params}
        restored, meta = _read(path, checkpoints, like, exclusion, say, check)
        say(f"started with the parameters of {path} (step {meta['step']}){but}")
        return trainer.fresh(restored["params"]), Seen(), meta
    exclusion = Exclusion(patterns, lambda: trainer.init().parts())
    restored, meta = _read(path, checkpoints, shapes.parts(), exclusion, say, check)
    return *_resumed(trainer, restored, meta, data, say, but), meta


def _ending_as(data: DataConfig, serving: ServingFiles) -> ServingFiles:
    """The same where a text also ends with what ends the documents of prepared data."""
    alone = [data.path] if data.source == "file" else []
    paths = [source.path for source in data.sources if source.weight] or alone
    folders = [folder for path in paths for folder in prepared_folders(path)]
    for folder in folders[:1]:  # all were prepared with the same tokenizer
        serving = serving.with_end(read_manifest(folder).tokenizer.eod, folder / TOKENIZER)
    return serving


def describe(trainer: Trainer, data: Data, seen: Seen, guard: Guard) -> dict[str, Any]:
    """What is stored beside a state: where the data stands, and what it was trained with."""
    parallel = trainer.config.parallel
    return {
        "position": seen.position,
        "restarted_at": seen.restarted_at,
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
    seen, restarts = _seen(meta, trainer.config), not data.train.has(meta["data"])
    if restarts and not trainer.config.data.restart:
        raise ConfigError(
            f"checkpoint {meta['step']} was trained on {meta['data']} but this run reads "
            f"{data.train.fingerprint}: give the same [data], train.seq_len and train.seed, "
            f"another run.dir, data.restart=true to go on with this data from its beginning, or "
            f"take only the parameters (checkpoint.parameters_only)."
        )
    say(f"resumed from step {meta['step']} (saved with {meta['layout']}){but}")
    if restarts:
        seen = seen._replace(restarted_at=seen.samples)
        say(
            f"data.restart: after {meta['data']} the run goes on with {data.train.fingerprint}, "
            f"from its beginning"
        )
    known, has = trainer.state_shapes.variables, parts.get("variables") or {}
    if new := sorted(known.keys() - has.keys()) if isinstance(known, dict) else []:
        say(f"the checkpoint has no {', '.join(new)} of this model: begun anew")
    return trainer.state_of(parts, meta.get("guard", {})), seen


def _seen(meta: dict[str, Any], config: Config) -> Seen:
    """What the run of a checkpoint had seen; an older one has no tokens, and no padding."""
    restarted_at = meta.get("restarted_at", 0)
    samples = restarted_at + meta["position"]
    return Seen(samples, meta.get("tokens", samples * config.train.seq_len), restarted_at)


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
