"""Low-rank adapters on disk: merged into weights, and in PEFT's format.

A layer's adapter of the weight `attn/wq` has the paths `lora/attn/wq/a` and `/b`. PEFT names its
matrices `base_model.model.<name of the weight>.lora_A.weight` `[rank, in]` and `.lora_B.weight`
`[out, rank]`, in adapter_model.safetensors, and describes them in adapter_config.json.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from jaxpipe.checkpoint.hf.naming import NamedParameter, list_parameters
from jaxpipe.checkpoint.hf.placing import ParamPath, Read
from jaxpipe.checkpoint.hf.safetensors_directory import ADAPTER_SETTINGS, complete_directory
from jaxpipe.config import ConfigError, LoraConfig
from jaxpipe.model import ModelConfig
from jaxpipe.model.layers.lora import NAME, Adapter, merge_adapter

FILE, SETTINGS = "adapter_model.safetensors", ADAPTER_SETTINGS
PREFIX, MATRICES = "base_model.model.", {"a": "lora_A", "b": "lora_B"}


def adapter_paths(path: ParamPath) -> Adapter:
    """Paths of the two matrices of the adapter of the weight at a path.

    >>> adapter_paths(("layers", "3", "attn", "wq")).a
    ('layers', '3', 'lora', 'attn', 'wq', 'a')
    """
    own = (*path[:2], NAME, *path[2:])
    return Adapter((*own, "a"), (*own, "b"))


def merging(read: Read, has: Callable[[ParamPath], bool], scale: float) -> Read:
    """A `read` of weights to which their adapters are added, where there are any.

    Args:
      read: reads the arrays at paths.
      has: whether there is an array at a path.
      scale: factor of the adapters' products.
    """

    def read_merged(paths: Sequence[ParamPath]) -> list[np.ndarray]:
        arrays = read(paths)
        adapted = [i for i, path in enumerate(paths) if has(adapter_paths(path).a)]
        if not adapted:
            return arrays
        matrices = iter(read([part for i in adapted for part in adapter_paths(paths[i])]))
        for i in adapted:
            adapter = Adapter(*(next(matrices).astype(np.float32) for _ in range(2)))
            arrays[i] = merge_adapter(arrays[i].astype(np.float32), adapter, scale)
        return arrays

    return read_merged


def export_adapters(
    read: Read, has: Callable[[ParamPath], bool], model: ModelConfig, lora: LoraConfig, target: Path
) -> int:
    """Write the adapters in PEFT's format to a directory; return how many there are.

    Arguments are those of `merging`, and the settings of the run that trained them. `target` must
    not exist or be empty, and appears only when it is complete. Raises `ConfigError` where it is
    not empty or cannot be written, or PEFT cannot express an adapter.
    """
    adapted = [one for one in list_parameters(model) if has(adapter_paths(one.path).a)]
    tensors: dict[str, np.ndarray] = {}
    for parameter in adapted:
        _check_expressible(parameter)
        matrices = read(list(adapter_paths(parameter.path)))
        for matrix, array in zip(MATRICES.values(), matrices):
            every = array if parameter.is_stacked else array[None]
            for name, one in zip(parameter.hf_names, every):
                tensors[peft_name(name, matrix)] = np.ascontiguousarray(one.T, np.float32)
    modules, weights = set[str](), set[str]()
    for one in adapted:
        beside_experts = model.routed_experts and not one.has_experts and _is_mlp(one.hf_names[0])
        (weights if beside_experts else modules).update(map(_module, one.hf_names))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0 if weights else lora.dropout,  # PEFT has none for single weights
        "target_modules": sorted(modules),
        "target_parameters": sorted(f"{name}.weight" for name in weights) or None,
        "fan_in_fan_out": not any(one.hf_tensor.transposed for one in adapted),
        "bias": "none",
        "inference_mode": True,
    }
    with complete_directory(target) as directory:
        (directory / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
        (directory / FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
    return len(adapted)


def _check_expressible(parameter: NamedParameter) -> None:
    if parameter.has_experts and not parameter.is_stacked:
        raise ConfigError(
            f"{parameter.hf_tensor.name} holds all experts of a layer, and PEFT reads no adapters "
            f"of single experts there: export the merged model, without --adapters."
        )
    if parameter.widths:
        raise ConfigError(
            f"{parameter.hf_tensor.name} holds {len(parameter.widths)} weights there, whose "
            f"adapters PEFT cannot keep apart: export the merged model, without --adapters."
        )


def _is_mlp(name: str) -> bool:
    """Whether a weight is of an MLP; in a model of experts PEFT takes its module for experts."""
    return name.endswith(("gate_proj.weight", "up_proj.weight", "down_proj.weight"))


def _module(name: str) -> str:
    """The last two parts of a module's name, by which PEFT finds it: `self_attn.q_proj`."""
    return ".".join(name.removesuffix(".weight").split(".")[-2:])


def peft_name(name: str, matrix: str) -> str:
    """PEFT's name of a matrix of the adapter of a weight."""
    return f"{PREFIX}{name.removesuffix('.weight')}.{matrix}.weight"
