"""The initial state of a run: from its newest checkpoint, from another run's, or new."""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import msgspec

from jaxpipe import config as configs
from jaxpipe.checkpoint import CheckpointStore, DamagedError, Exclusion, find_newest, read_state
from jaxpipe.checkpoint.compatibility import Check, check_same_settings
from jaxpipe.checkpoint.hf.peft_reading import read_adapters
from jaxpipe.checkpoint.hf.placing import Read, place_parameters
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.config import Config, ConfigError, OptimizerConfig, ParallelConfig
from jaxpipe.data.shards.manifest import read_manifest
from jaxpipe.data.shards.token_files import find_prepared_folders
from jaxpipe.data.sources import RunData
from jaxpipe.model.layers.lora import NAME as LORA
from jaxpipe.optimizer import has_average, learning_rate
from jaxpipe.planning import Devices, RunPlan, resolve
from jaxpipe.runtime.storage.files import AnyPath, local_copy, open_path
from jaxpipe.tokenizer.files import BYTES, TokenizerFiles
from jaxpipe.training.state import State
from jaxpipe.training.step_guard import StepGuard, able_to_go_on
from jaxpipe.training.trainer import Trainer

Tree = Any
Say = Callable[[str], None]


class DataPosition(NamedTuple):
    """A run's position in its training data."""

    samples: int = 0  # trained on in the run so far
    tokens: int = 0  # trained on in the run so far, without padding
    restarted_at: int = 0  # `samples` when the run changed to its present data (`data.restart`)
    passed_over: int = 0  # samples of the present data that rollbacks passed over
    rollbacks: int = 0  # rollbacks of the run so far (`train.spike_rollbacks`)

    @property
    def position(self) -> int:
        """The index of the next sample in the present data."""
        return self.samples - self.restarted_at + self.passed_over


def start(
    trainer: Trainer, data: RunData, checkpoints: CheckpointStore, say: Say
) -> tuple[State, DataPosition]:
    """The state and the data position to continue from.

    Sets `checkpoints.carried`, so that the run's checkpoints keep the tokenizer and the EOS token
    that the data or the checkpoint it starts from has. Raises `ConfigError` where a checkpoint does
    not belong to this run's model or data, and where all checkpoints are damaged: a run that had
    checkpoints never starts from step 0 by itself.
    """
    state, seen, meta = _started(trainer, data, checkpoints, say)
    serving = _with_data(trainer.config, ServingFiles.from_meta(meta))
    checkpoints.carried = serving.as_meta()
    return state, seen


def _started(
    trainer: Trainer, data: RunData, checkpoints: CheckpointStore, say: Say
) -> tuple[State, DataPosition, dict[str, Any]]:
    """State, data position and the checkpoint's metadata, which is empty for a new state."""
    resume = trainer.config.checkpoint.resume
    if resume == "none" and checkpoints.steps:
        raise ConfigError(
            f"{checkpoints.directory} holds checkpoints of steps {checkpoints.steps} but "
            f"checkpoint.resume='none': use resume='auto' to continue, or another run.dir."
        )
    if resume == "none":
        checkpoints.clear_local()
    shapes = trainer.state_shapes
    check = partial(check_same_settings, config=trainer.config, with_moments=True)
    if latest := checkpoints.restore(shapes.parts(), say, check):
        restored, meta = latest
        return *_resumed(trainer, restored, meta, data, say, older_steps=checkpoints.steps), meta
    if resume != "none" and checkpoints.damaged_directories:
        damaged = ", ".join(path.name for path in checkpoints.damaged_directories)
        raise ConfigError(
            f"{checkpoints.directory} holds no checkpoint but {damaged}: set checkpoint.resume="
            "none to begin anew, or use another run.dir."
        )
    if resume == "auto" and (rank := trainer.config.lora.rank):
        raise ConfigError(
            f"lora.rank={rank} trains adapters of a trained model, but checkpoint.resume='auto' "
            f"finds no checkpoint in {checkpoints.directory}: give the model's as "
            f"checkpoint.resume, with checkpoint.parameters_only=true; checkpoint.resume=none "
            f"starts from initial parameters."
        )
    if resume in ("auto", "none"):
        return _fresh(trainer, trainer.init_parameters(), say), DataPosition(), {}
    path = find_newest(open_path(resume), "checkpoint.resume", "'auto', 'none', ")
    patterns = trainer.config.checkpoint.exclude
    but = f", but {', '.join(patterns)} new" if patterns else ""
    if trainer.config.checkpoint.parameters_only:
        adapters = (f"layers/*/{LORA}/*",) if trainer.config.lora.rank else ()
        exclusion = Exclusion(patterns, lambda: {"params": trainer.init_parameters()}, adapters)
        check = partial(check_same_settings, config=trainer.config, with_moments=False)
        like = {"params": shapes.params, "variables": shapes.variables}
        restored, meta = _read(path, checkpoints, like, exclusion, say, check)
        say(f"started with the parameters of {path} (step {meta['step']}){but}")
        state = _fresh(trainer, restored["params"], say)
        if imported := restored.get("variables"):
            state = state._replace(variables=state.variables | imported)
        return state, DataPosition(), meta
    if adapter := trainer.config.lora.adapter:
        raise ConfigError(
            f"lora.adapter={adapter!r} with the full state of checkpoint.resume={resume!r}, which "
            f"has adapters of its own: leave lora.adapter out, or set checkpoint.parameters_only."
        )
    exclusion = Exclusion(patterns, lambda: trainer.init().parts())
    restored, meta = _read(path, checkpoints, shapes.parts(), exclusion, say, check)
    return *_resumed(trainer, restored, meta, data, say, but), meta


def _fresh(trainer: Trainer, params: Tree, say: Say) -> State:
    """The state of step 0 with these parameters, and the adapters of `lora.adapter`, if given."""
    lora = trainer.config.lora
    if not lora.adapter:
        return trainer.fresh(params)
    shapes = jax.eval_shape(lambda: params)
    own = tuple({LORA: layer[LORA]} for layer in shapes["layers"])

    def place(read: Read) -> Tree:
        tree = {"embed_head": {}, "layers": own}
        return place_parameters(read, tree, trainer.layout, trainer.sharding, lora.adapter)

    folder, seed = local_copy(lora.adapter), trainer.config.train.seed
    placed = read_adapters(folder, trainer.config.model, lora, place, seed=seed, say=say)
    layers = (layer | new for layer, new in zip(params["layers"], placed["layers"]))
    return trainer.fresh(params | {"layers": tuple(layers)})


def _with_data(config: Config, serving: ServingFiles) -> ServingFiles:
    """Add what the prepared data know: their tokenizer, and what ends documents and turns."""
    data, size = config.data, config.model.vocab_size
    if data.source == "stdlib" and not data.sources:
        return serving.with_data(TokenizerFiles.read(BYTES), size)
    alone = [data.path] if data.source == "file" else []
    paths = [source.path for source in data.sources if source.weight] or alone
    for folder in (folder for path in paths for folder in find_prepared_folders(path)):
        manifest = read_manifest(folder)  # all were prepared with the same tokenizer
        ends = [manifest.tokenizer.eod, manifest.end_of_turn]
        serving = serving.with_data(
            TokenizerFiles.read(folder),
            size,
            ends=[token for token in ends if token is not None],
            starts=manifest.tokenizer.bos,
            has_chats=bool(manifest.chats),
        )
    return serving


def describe(
    trainer: Trainer, data: RunData, seen: DataPosition, guard: StepGuard
) -> dict[str, Any]:
    """The metadata of a checkpoint: data position, guard, data, layout and configuration."""
    parallel = trainer.config.parallel
    return {
        "position": seen.position,
        "restarted_at": seen.restarted_at,
        "passed_over": seen.passed_over,
        "rollbacks": seen.rollbacks,
        "tokens": seen.tokens,
        "guard": guard.saved(),
        "has_average": has_average(trainer.state_shapes.optimizer),
        "data": data.train.fingerprint,
        "layout": f"{parallel.mesh} {parallel.schedule}",
        "config": configs.to_toml(trainer.config),
    }


def resolve_on_one_device(config: Config, device: jax.Device) -> RunPlan:
    """The plan of a run on one device, whose initial state equals that on any mesh."""
    alone = msgspec.structs.replace(config, parallel=ParallelConfig(schedule="gpipe"))
    return resolve(alone, Devices.present([device]))


def _resumed(
    trainer: Trainer,
    parts: dict[str, Any],
    meta: dict[str, Any],
    data: RunData,
    say: Say,
    but: str = "",
    older_steps: Sequence[int] = (),
) -> tuple[State, DataPosition]:
    """The state and data position of a checkpoint; `older_steps`: of checkpoints to go back to."""
    seen, restarts = position_in(meta, trainer.config), not data.train.has(meta["data"])
    if restarts and not trainer.config.data.restart:
        raise ConfigError(
            f"checkpoint {meta['step']} was trained on {meta['data']} but this run reads "
            f"{data.train.fingerprint}: give the same [data], train.seq_len and train.seed, "
            f"another run.dir, data.restart=true to go on with this data from its beginning, or "
            f"take its parameters alone, in another run.dir, with checkpoint.resume=PATH "
            f"checkpoint.parameters_only=true."
        )
    say(f"resumed from step {meta['step']} (saved with {meta['layout']}){but}")
    if jump := rate_jump(meta, trainer.config):
        say(jump)
    if restarts:
        seen = seen._replace(restarted_at=seen.samples, passed_over=0)
        say(
            f"data.restart: after {meta['data']} the run goes on with {data.train.fingerprint}, "
            f"from its beginning"
        )
    known, has = trainer.state_shapes.variables, parts.get("variables") or {}
    if new := sorted(known.keys() - has.keys()) if isinstance(known, dict) else []:
        say(f"the checkpoint has no {', '.join(new)} of this model: started from initial values")
    guard, train = meta.get("guard", {}), trainer.config.train
    first_spike = meta["step"] - guard.get("spikes", {}).get("in_row", 0) + 1
    guard = able_to_go_on(
        guard, train,
        may_roll_back=seen.rollbacks < train.spike_rollbacks,
        has_older=min(older_steps, default=first_spike) < first_spike,
    )  # fmt: skip
    return trainer.state_of(parts, guard), seen


def rate_jump(meta: Mapping[str, Any], config: Config) -> str | None:
    """A sentence if a run goes on from a checkpoint at another learning rate than that had."""
    try:
        saved = tomllib.loads(meta["config"])
        optimizer = msgspec.convert(saved["optimizer"], OptimizerConfig)
        steps = saved["train"]["steps"]
    except (KeyError, tomllib.TOMLDecodeError, msgspec.ValidationError):
        return None  # of another program or version
    done = meta["step"] - int(meta.get("guard", {}).get("skipped", 0))
    before, now = (
        float(learning_rate(of, until)(done))
        for of, until in ((optimizer, steps), (config.optimizer, config.train.steps))
    )
    if math.isclose(before, now, rel_tol=1e-3):
        return None
    pairs = {"train.steps": (steps, config.train.steps)} | {
        f"optimizer.{key}": (getattr(optimizer, key), getattr(config.optimizer, key))
        for key in optimizer.__struct_fields__
    }
    changes = ", ".join(f"{key} was {a} and is {b}" for key, (a, b) in pairs.items() if a != b)
    return (
        f"the learning rate of step {meta['step'] + 1} is {now:.2e}, not {before:.2e} as the "
        f"checkpoint's run had it: {changes}"
    )


def position_in(meta: dict[str, Any], config: Config) -> DataPosition:
    """The data position in a checkpoint's metadata.

    Older metadata has no `tokens`; the rows of these checkpoints had no padding.
    """
    restarted_at, passed_over = meta.get("restarted_at", 0), meta.get("passed_over", 0)
    samples = restarted_at + meta["position"] - passed_over
    tokens = meta.get("tokens", samples * config.train.seq_len)
    return DataPosition(samples, tokens, restarted_at, passed_over, meta.get("rollbacks", 0))


def _read(
    path: AnyPath,
    checkpoints: CheckpointStore,
    like: Any,
    exclusion: Exclusion,
    say: Say,
    check: Check,
) -> tuple[Any, dict[str, Any]]:
    """Read a checkpoint of another run, which is not renamed if it is damaged."""
    try:
        keying, group = checkpoints.keying, checkpoints.group
        return read_state(path, keying, like, exclusion, say, check, group=group)
    except DamagedError as error:
        raise ConfigError(
            f"checkpoint {path} is damaged ({error}): give another as checkpoint.resume."
        ) from error
