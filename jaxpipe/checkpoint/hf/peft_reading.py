"""Adapters that PEFT wrote, read into a run."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxpipe.checkpoint.hf.adapters import FILE, MATRICES, PREFIX, SETTINGS, peft_name
from jaxpipe.checkpoint.hf.naming import NamedParameter, hf_format, list_parameters
from jaxpipe.checkpoint.hf.peft_settings import MERGE, equivalent_alpha, is_adapted, refusal
from jaxpipe.checkpoint.hf.placing import ParamPath, Read
from jaxpipe.config import ConfigError, LoraConfig
from jaxpipe.model import ModelConfig
from jaxpipe.model.layers.lora import init_adapter, product_of

Tree = Any
_TEXT_MODELS = "model.language_model.", "language_model.model."  # within multimodal models


def read_adapters(
    source: Path,
    model: ModelConfig,
    lora: LoraConfig,
    place: Callable[[Read], Tree],
    *,
    seed: int,
    say: Callable[[str], None],
) -> Tree:
    """Read adapters in PEFT's format, and return what `place` makes of them.

    Layers that PEFT leaves out start with initial adapters, whose product is zero.

    Args:
      source: a directory with both files.
      model: the model.
      lora: settings of the run.
      place: gets a function that reads the adapters at paths, and reads them all.
      seed: of initial adapters.
      say: gets a sentence if there are initial adapters.

    Raises `ConfigError` where the directory cannot be read, its rank or factor are not those of the
    settings, a setting is not understood, or an adapter is missing or left over.
    """
    files = _PeftFiles.open(source, model, lora, seed)
    placed = place(lambda paths: [files.matrix(path) for path in paths])
    files.check_all_read()
    if new := files.initial:
        say(
            f"{source} leaves {len(new)} weights without adapters that lora.targets names "
            f"({min(new)} first): theirs start anew, with a product of zero"
        )
    return placed


@dataclass(frozen=True)
class _PeftFiles:
    """The content of both files.

    Attributes:
      source: their directory.
      settings: content of adapter_config.json.
      tensors: the matrices by name.
      parameters: the weights of the model by path, with their names in the adapted model.
      factor: of PEFT's products over that of the run's.
      rank: inner width of the adapters.
      seed: of initial adapters.
      read: names of the tensors that were read.
      initial: names of the weights that got initial adapters.
    """

    source: Path
    settings: dict[str, Any]
    tensors: dict[str, np.ndarray]
    parameters: dict[ParamPath, tuple[NamedParameter, tuple[str, ...]]]
    factor: float
    rank: int
    seed: int
    read: set[str] = field(default_factory=set)
    initial: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, source: Path, model: ModelConfig, lora: LoraConfig, seed: int) -> Self:
        """Read the files; raises `ConfigError` as `read_adapters` does."""
        try:
            settings = dict(json.loads((source / SETTINGS).read_text()))
            tensors = load_file(source / FILE)
        except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
            raise ConfigError(
                f"lora.adapter={str(source)!r} holds no adapters in PEFT's format ({error}): give "
                f"a folder with {SETTINGS} and {FILE}."
            ) from error
        factor, form = _check_settings(source / SETTINGS, settings, lora), hf_format(model)
        # The adapted model may be the text model of a multimodal one, or have no head.
        bases = (form.BASE, *_TEXT_MODELS, "")
        layers = form.PREFIX.partition("{}")[0].removeprefix(form.BASE)
        used = (b for b in bases if any(name.startswith(PREFIX + b + layers) for name in tensors))
        base = next(used, form.BASE)
        parameters = {
            one.path: (one, tuple(base + name.removeprefix(form.BASE) for name in one.hf_names))
            for one in list_parameters(model)
            if one.path[0] == "layers"
        }
        return cls(source, settings, tensors, parameters, factor, lora.rank, seed)

    def matrix(self, path: ParamPath) -> np.ndarray:
        """The matrix of an adapter at a path, `("layers", "3", "lora", "attn", "wq", "a")`."""
        weight, matrix = (*path[:2], *path[3:-1]), path[-1]
        parameter, names = self.parameters[weight]
        stored = [peft_name(name, MATRICES[matrix]) for name in names]
        self.read.update(stored)
        initial = self._initial(weight, matrix)
        every = [
            self.tensors[key].T.astype(np.float32) * (self.factor if matrix == "b" else 1)
            if key in self.tensors
            else initial(number, names[number])
            for number, key in enumerate(stored)
        ]
        if wrong := [key for key, one in zip(stored, every) if one.shape != every[0].shape]:
            raise ConfigError(
                f"{self.source}/{FILE} has {wrong[0]} of another shape than {stored[0]}: give "
                f"another lora.adapter."
            )
        return np.stack(every) if parameter.is_stacked else every[0]

    def _initial(self, weight: ParamPath, matrix: str) -> Callable[[int, str], np.ndarray]:
        """The initial matrices of a weight's adapter by number and name, where PEFT has none."""

        def initial(number: int, name: str) -> np.ndarray:
            if weight[2:] not in self._given or self._is_adapted(name):
                raise ConfigError(
                    f"{self.source}/{FILE} has no {peft_name(name, MATRICES[matrix])}: leave "
                    f"{product_of(weight)} out of lora.targets, or give another lora.adapter."
                )
            self.initial.add(name)
            key, (parameter, _) = jax.random.key(self.seed), self.parameters[weight]
            of_layer = jax.random.fold_in(key, int(weight[1]))
            adapter = init_adapter(of_layer, weight[2:], parameter.shape, self.rank)
            drawn = np.asarray(getattr(adapter, matrix))
            return drawn[number] if parameter.is_stacked else drawn

        return initial

    @cached_property
    def _weights(self) -> dict[str, ParamPath]:
        """The path of the weight that each matrix of the model's layers belongs to."""
        return {
            peft_name(name, matrix): path
            for path, (_, names) in self.parameters.items()
            for name in names
            for matrix in MATRICES.values()
        }

    @cached_property
    def _given(self) -> set[ParamPath]:
        """The weights, without their layer, that have adapters in some layer."""
        return {self._weights[name][2:] for name in self.tensors if name in self._weights}

    def _is_adapted(self, name: str) -> bool:
        """Whether PEFT adapts the weight of a name, by the settings."""
        try:
            return is_adapted(name.removesuffix(".weight"), self.settings)
        except (re.error, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.source / SETTINGS} has modules or layers that cannot be read ({error}): "
                f"correct target_modules, exclude_modules and layers_to_transform."
            ) from error

    def check_all_read(self) -> None:
        """Raise `ConfigError` where a tensor was not read, or PEFT would not read it."""
        place = f"{self.source}/{FILE}"
        if unread := sorted(self.tensors.keys() - self.read):
            path = self._weights.get(unread[0])
            if path and path[-1].startswith("w"):  # others have no adapters here
                remedy = f"add {product_of(path)} to lora.targets"
            else:
                remedy = "give adapters of the layers of this model"
            by = f" (bias={self.settings.get('bias')!r})" if unread[0].endswith("bias") else ""
            raise ConfigError(
                f"{place} also has {unread[0]}{by}, but there is no such adapter here: {remedy}, "
                f"or {MERGE}."
            )
        names = {name for path, (_, names) in self.parameters.items() for name in names}
        for name in sorted(names):
            if peft_name(name, MATRICES["a"]) in self.tensors and not self._is_adapted(name):
                raise ConfigError(
                    f"{place} has an adapter of {name}, which PEFT would not read by {SETTINGS}: "
                    f"correct target_modules, exclude_modules or layers_to_transform there."
                )


def _check_settings(place: Path, settings: dict[str, Any], lora: LoraConfig) -> float:
    """The factor of PEFT's products over that of the run's; raises `ConfigError`."""
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if sentence := refusal(settings):
        raise ConfigError(f"{place} {sentence}")
    if rank != lora.rank:
        raise ConfigError(f"{place} has r={rank}, but lora.rank={lora.rank}: set lora.rank={rank}.")
    if not isinstance(alpha, int | float):
        raise ConfigError(f"{place} has lora_alpha={alpha!r}, which is no number: correct it.")
    wanted = equivalent_alpha(settings)
    if lora.alpha not in (alpha, wanted):
        root = " and use_rslora" if settings.get("use_rslora") else ""
        raise ConfigError(
            f"{place} has lora_alpha={alpha}{root}, but lora.alpha={lora.alpha}: set "
            f"lora.alpha={wanted}."
        )
    return wanted / lora.alpha
