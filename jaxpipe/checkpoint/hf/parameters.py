"""Import and export of parameters in Hugging Face's names and layout.

jaxpipe computes `x @ w` with w `[in, out]`; torch's `Linear` holds `[out, in]`. Attention heads and
their rotary halves have the same order in both. Hugging Face may fuse queries, keys and values
into one tensor. A tied head is the embedding in both, but some checkpoints store it twice. Each
expert's matrix is a tensor in Hugging Face; jaxpipe stacks them into one parameter `[E, in, out]`.

Tensors are read, converted and written one by one. Memory holds one parameter during an import;
during an export it holds one layer without its experts, or one stacked expert parameter.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxpipe.checkpoint.hf.naming import (
    VARIABLES,
    NamedParameter,
    hf_format,
    list_parameters,
    locate_parameters,
)
from jaxpipe.checkpoint.hf.safetensors_directory import (
    TensorFiles,
    complete_directory,
    write_tensors,
)
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.checkpoint.hf.streaming import LazyArray, StoredCheckpoint, save_parameters
from jaxpipe.config import ConfigError
from jaxpipe.model import FAMILIES, ModelConfig
from jaxpipe.model.layers.lora import NAME
from jaxpipe.model.published import HuggingFace, architecture


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json in `directory`; `ConfigError` where it is missing or unreadable."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{directory} has no config.json: give the directory of a Hugging Face checkpoint."
        )
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): correct it.") from error


def model_settings(hf_config: dict[str, Any], place: Path) -> dict[str, Any]:
    """The fields of `[model]` that differ from their defaults, for `hf_config`, a config.json.

    Raises `ConfigError` where no family supports the model. `place` is used in messages.
    """
    known = {
        name: (family, form)
        for family in FAMILIES.values()
        for form in family.formats
        for name in form.ARCHITECTURES
    }
    try:
        family, form = known[architecture(hf_config, tuple(known))]
        settings, described = form.expected(hf_config), form.with_defaults(hf_config)
    except ValueError as error:
        raise ConfigError(f"{place}/config.json {error}") from error
    except ZeroDivisionError as error:
        raise ConfigError(
            f"{place}/config.json has a number of heads that is 0: take the whole file."
        ) from error
    if longest := described.get("max_position_embeddings"):
        if not isinstance(longest, int):
            raise ConfigError(
                f"{place}/config.json has max_position_embeddings={longest!r}, no integer: correct "
                f"it."
            )
        settings["max_seq_len"] = longest
    if unknown := [name for name, value in settings.items() if value is None]:
        raise ConfigError(
            f"{place}/config.json has null for what is model.{unknown[0]} here: give it a number."
        )
    defaults = {field.name: field.default for field in msgspec.structs.fields(family.config)}
    needed = {name: value for name, value in settings.items() if value != defaults[name]}
    return {"family": family.name} | needed


def check_same_model(hf_config: dict[str, Any], model: ModelConfig, place: Path) -> None:
    """Raise `ConfigError` unless `hf_config`, the config.json in `place`, describes `model`."""
    try:
        expected = FAMILIES[model.family].format_named(hf_config).expected(hf_config)
    except ValueError as error:
        raise ConfigError(f"{place}/config.json {error}") from error
    ours = {name: getattr(model.resolved(), name) for name in expected}
    wrong = [name for name, value in expected.items() if ours[name] != value]
    if wrong:
        differences = ", ".join(
            f"{name} is {json.dumps(expected[name])} there and {json.dumps(ours[name])} here"
            for name in wrong
        )
        remedy = " ".join(f"model.{name}={json.dumps(expected[name])}" for name in wrong)
        raise ConfigError(f"{place}/config.json and [model] differ: {differences}; set {remedy}.")


def training_settings(source: Path, model: ModelConfig) -> dict[str, Any]:
    """Training-only fields of `[model]` whose value in `source`/config.json differs, by name."""
    settings = _format_named(source, model).trained(read_config(source), model)
    return {name: value for name, value in settings.items() if getattr(model, name) != value}


def import_huggingface(
    source: Path, model: ModelConfig, checkpoints: Path, meta: dict[str, Any]
) -> Path:
    """Write the parameters in `source` as a checkpoint of step 0; return the step's directory.

    Parameters keep their dtypes, except that float64 becomes float32; a restore casts them to the
    run's dtype. The metadata is `meta` with the tokenizer and other `ServingFiles` added. Raises
    `ConfigError`, with nothing written, where config.json does not describe `model`, its sizes do
    not fit each other, tensors are missing, unknown or of another shape, or `checkpoints` already
    holds checkpoints.
    """
    check_same_model(read_config(source), model, source)
    for sentence in model.broken_rules(1):
        raise ConfigError(f"{source}/config.json describes a model that no run takes: {sentence}")
    serving, (files, wanted) = read_serving_files(source, model), open_tensors(source, model)

    def lazy(parameter: NamedParameter) -> LazyArray:
        return LazyArray(
            parameter.shape,
            files.dtype(parameter.hf_names[0], integer=parameter.is_integer),
            lambda: parameter.from_hf(files.read),
        )

    state = unflatten_dict({parameter.stored_path: lazy(parameter) for parameter in wanted})
    about = {"source": str(source.absolute())} | serving.as_meta()
    return save_parameters(checkpoints, state, meta | about)


def open_tensors(source: Path, model: ModelConfig) -> tuple[TensorFiles, list[NamedParameter]]:
    """The tensors in `source`, and the parameters of `model` with the names that they have there.

    Raises `ConfigError` where tensors are missing, unknown or of another shape.
    """
    form = _format_named(source, model)
    files = TensorFiles(source, without=form.BUFFERS)
    wanted = locate_parameters(model, form, files)
    _check_tensors(files, wanted, form, model)
    return files, wanted


def ignored_tensors(source: Path, model: ModelConfig) -> list[str]:
    """Names of the tensors in `source` that an import leaves out, in order of the alphabet."""
    files, wanted = open_tensors(source, model)
    return sorted({*files.names}.difference(*(parameter.hf_names for parameter in wanted)))


def read_serving_files(source: Path, model: ModelConfig) -> ServingFiles:
    """What generation needs besides the weights in `source`, with transformers' defaults."""
    return ServingFiles.read(
        source, _format_named(source, model).with_defaults(read_config(source))
    )


def _format_named(source: Path, model: ModelConfig) -> HuggingFace:
    """The format of the architecture that config.json names, of the model's family."""
    hf_config = read_config(source)
    try:
        return FAMILIES[model.family].format_named(hf_config)
    except ValueError as error:
        raise ConfigError(f"{source}/config.json {error}") from error


def export_huggingface(
    checkpoint: StoredCheckpoint,
    model: ModelConfig,
    target: Path,
    *,
    dtype: str,
    max_positions: int,
    max_shard_bytes: int,
    serving: ServingFiles,
) -> None:
    """Write a checkpoint's parameters as config.json and safetensors of `dtype`.

    The parameters are the ones that a held-out loss evaluates (`StoredCheckpoint.parameters`). The
    token ids of `serving` go into config.json, and its files into the same directory. `target` must
    not exist or be empty, and appears only when it is complete. Raises `ConfigError` where `target`
    is not empty or cannot be written, or the checkpoint is of another model.
    """
    kind = np.dtype(jnp.dtype(dtype))
    config_json = _build_config_json(model, str(kind), max_positions, serving)
    wanted = list_parameters(model)
    _check_stored(checkpoint, wanted)

    def read(paths: Sequence[tuple[str, ...]]) -> list[np.ndarray]:
        return checkpoint.read(paths) if paths[0][0] == VARIABLES else checkpoint.parameters(paths)

    with complete_directory(target) as directory:
        (directory / "config.json").write_text(config_json)
        serving.write(directory)
        write_tensors(
            directory,
            {name: parameter.hf_shape for parameter in wanted for name in parameter.hf_names},
            convert_tensors(read, wanted),
            dtype=kind,
            others={
                name: parameter.hf_dtype
                for parameter in wanted
                if parameter.hf_dtype is not None
                for name in parameter.hf_names
            },
            max_shard_bytes=max_shard_bytes,
        )


def _build_config_json(
    model: ModelConfig, dtype: str, positions: int, serving: ServingFiles
) -> str:
    try:
        written = hf_format(model).written(model, dtype, positions)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return json.dumps(written | serving.token_ids, indent=2) + "\n"


def _check_experts(files: TensorFiles, name: str, model: ModelConfig) -> None:
    """Raise `ConfigError` where a tensor of numbers of experts has others."""
    found = files.read(name)
    if found.min() < 0 or found.max() >= model.routed_experts:
        raise ConfigError(
            f"{files.directory} has {name} with numbers from {found.min()} to {found.max()}, but "
            f"its experts are 0 to {model.routed_experts - 1}: take another checkpoint."
        )


def _check_tensors(
    files: TensorFiles, wanted: list[NamedParameter], form: HuggingFace, model: ModelConfig
) -> None:
    place, names = files.directory, set(files.names)
    owner = {name: parameter for parameter in wanted for name in parameter.hf_names}
    ignores = getattr(form, "ignores", lambda name, model: False)
    unknown = {name for name in names - set(owner) if not ignores(name, model)}
    for name, parameter in owner.items():
        if name not in names:
            other = f", and {min(unknown)}, which the model has no place for" if unknown else ""
            raise ConfigError(
                f"{place} has no tensor {name}, which its config.json describes{other}: take a "
                f"checkpoint that holds all of {form.MODELS}."
            )
        if files.shape(name) != parameter.hf_shape:
            raise ConfigError(
                f"{place} has {name} of shape {files.shape(name)} but its config.json "
                f"describes {parameter.hf_shape}: take config.json and weights of the same model."
            )
        dtype, first = files.dtype(name, integer=parameter.is_integer), parameter.hf_names[0]
        if parameter.is_integer:
            _check_experts(files, name, model)
        elif dtype != files.dtype(first):
            raise ConfigError(
                f"{place} has {name} in {dtype} but {first} in {files.dtype(first)}, and they are "
                f"one parameter here: convert one of them."
            )
    if form.tied(model) and form.HEAD in unknown:
        (embed,) = (name for name, one in owner.items() if one.path == ("embed_head", "embed"))
        if not np.array_equal(files.read(form.HEAD), files.read(embed)):
            raise ConfigError(
                f"{place} has a {form.HEAD} that differs from {embed} though its config.json "
                f"says tie_word_embeddings: set that to false there and in [model]."
            )
        unknown.remove(form.HEAD)
    if unknown:
        raise ConfigError(
            f"{place} has {len(unknown)} tensors that the model has no place for "
            f"({min(unknown)} first): take a checkpoint of "
            f"{form.MODELS}."
        )


def _check_stored(checkpoint: StoredCheckpoint, wanted: list[NamedParameter]) -> None:
    want = {parameter.stored_path: parameter.shape for parameter in wanted}
    have = {
        path: tuple(leaf.shape)
        for path, leaf in checkpoint.leaves.items()
        if (path[0] == "params" and NAME not in path) or path in want
    }
    for path in sorted({*want, *have}):
        if want.get(path) != have.get(path):
            raise ConfigError(
                f"checkpoint {checkpoint.directory} is of another model: {'/'.join(path)} has "
                f"shape {have.get(path, 'none (absent)')} there and "
                f"{want.get(path, 'none (absent)')} in this configuration; give the configuration "
                f"that it was saved with."
            )


def convert_tensors(
    read: Callable[[Sequence[tuple[str, ...]]], list[np.ndarray]], wanted: list[NamedParameter]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and tensor of all parameters; at most one layer is in memory at a time.

    `read` returns the arrays of parameters by their paths, `("layers", "17", "attn", "wq")`.
    """
    for _, group in groupby(wanted, key=_read_group):
        parameters = list(group)
        paths = [parameter.path for parameter in parameters]
        arrays = dict(zip(paths, read(paths)))
        for parts in _group_by_name(parameters).values():  # pop frees an array once it is written
            first = parts[0]
            tensors = first.join([arrays.pop(parameter.path) for parameter in parts])
            for name, tensor in zip(first.hf_names, tensors if first.is_stacked else [tensors]):
                yield name, first.to_hf(tensor)


def _group_by_name(wanted: list[NamedParameter]) -> dict[str, list[NamedParameter]]:
    """Parameters grouped by Hugging Face tensor name, in the order of the fused parts."""
    groups: dict[str, list[NamedParameter]] = {}
    for parameter in wanted:
        groups.setdefault(parameter.hf_tensor.name, []).append(parameter)
    return {
        name: sorted(parts, key=lambda parameter: parameter.hf_tensor.part)
        for name, parts in groups.items()
    }


def _read_group(parameter: NamedParameter) -> tuple[str, ...]:
    """Key of parameters read together: a layer without experts, or the parts of one tensor."""
    if parameter.path[0] == "layers" and not parameter.has_experts:
        return parameter.path[:2]
    return (parameter.hf_tensor.name,)
