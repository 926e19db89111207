"""A model on disk: a run's newest checkpoint, one checkpoint, or a Hugging Face directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from flax.traverse_util import unflatten_dict

from jaxpipe.checkpoint import find_newest
from jaxpipe.checkpoint.hf.parameters import (
    model_settings,
    open_tensors,
    read_config,
    read_serving_files,
)
from jaxpipe.checkpoint.hf.placing import ParamPath, Read
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.config import Config, ConfigError, build
from jaxpipe.model import ModelConfig
from jaxpipe.runtime.storage.files import AnyPath, local_copy, open_path

Tree = Any


@dataclass(frozen=True)
class SavedModel:
    """A trained model before it is on devices.

    Attributes:
      place: its directory, for messages.
      model: its `[model]`.
      serving: token ids and the tokenizer's files, as far as they are known.
      trained_by: configuration of the run that saved it; None: it is from Hugging Face.
      read: reads the parameters at these paths, in the order of the paths.
      variables: the model's state that is no parameter, as nested dicts of arrays; empty: none.
    """

    place: AnyPath
    model: ModelConfig
    serving: ServingFiles
    trained_by: Config | None
    read: Read
    variables: Tree

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a model; a directory with a config.json is one from Hugging Face.

        Raises `ConfigError` where there is no model, or it cannot be read.
        """
        place = open_path(path)
        if not place.exists():
            raise ConfigError(
                f"{place} does not exist: give a run's directory, one of its checkpoints, or a "
                f"model's directory from Hugging Face."
            )
        if (place / "config.json").exists():
            return cls._published(local_copy(place))
        return cls._trained(place)

    @classmethod
    def _published(cls, path: Path) -> Self:
        tree = {"model": model_settings(read_config(path), path), "train": _ANY_TRAIN}
        model = build(tree).model
        for sentence in model.broken_rules(1):
            raise ConfigError(f"{path}/config.json describes no model that is possible: {sentence}")
        files, parameters = open_tensors(path, model)
        by_path = {parameter.path: parameter for parameter in parameters}

        def read(paths: Sequence[ParamPath]) -> list[np.ndarray]:
            return [by_path[path].from_hf(files.read) for path in paths]

        variables = {one.path[1]: one.from_hf(files.read) for one in parameters if one.is_variable}
        return cls(path, model, read_serving_files(path, model), None, read, variables)

    @classmethod
    def _trained(cls, path: AnyPath) -> Self:
        checkpoint = StoredCheckpoint(
            find_newest(path, "MODEL", "a model's directory from Hugging Face, ")
        )
        config, names = checkpoint.config, [n for n in checkpoint.leaves if n[0] == "variables"]
        variables = unflatten_dict(dict(zip(names, checkpoint.read(names)))) if names else {}
        return cls(
            path,
            config.model,
            ServingFiles.from_meta(checkpoint.meta),
            config,
            checkpoint.parameters,
            variables.get("variables", {}),
        )

    @property
    def longest(self) -> int:
        """The longest sequence that the model is made for [tokens]; 0: any."""
        return self.model.max_seq_len


# `build` wants these settings, which no model depends on.
_ANY_TRAIN = {"steps": 1, "microbatch_size": 1, "seq_len": 2}
