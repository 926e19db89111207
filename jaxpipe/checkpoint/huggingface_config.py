"""Hugging Face's config.json and our `[model]`: compared, and the one made from the other.

What is read are the fields of transformers' `LlamaConfig` and `Qwen3Config`, as version 4 writes
them (`rope_theta`, `rope_scaling`, `torch_dtype`) and as version 5 does (`rope_parameters`,
`dtype`). A field that is absent has transformers' default.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.config import ConfigError, ModelConfig

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"

# Theirs, ours; sizes have no default that a checkpoint could mean.
_SIZES = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
    "vocab_size": "vocab_size",
}
_ROPE = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_positions",
}
# What our decoder does not have, and the only values under which theirs has neither.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of a checkpoint; `ConfigError` where there is none."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{directory} has no config.json: give the directory of a Hugging Face checkpoint."
        )
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): download it again.") from error


def check_same_model(theirs: dict[str, Any], model: ModelConfig, place: Path) -> None:
    """Raise `ConfigError` unless config.json in `place` describes the model of `[model]`."""
    architecture = _architecture(theirs, place)
    _check_plain(theirs, place)
    expected = _sizes(theirs, place) | _choices(theirs, architecture)
    ours = {name: getattr(model, name) for name in expected} | {"head_dim": model.head_size}
    wrong = [name for name, value in expected.items() if ours[name] != value]
    if wrong:
        differences = ", ".join(
            f"{name} is {_toml(expected[name])} there and {_toml(ours[name])} here"
            for name in wrong
        )
        remedy = " ".join(f"model.{name}={_toml(expected[name])}" for name in wrong)
        raise ConfigError(f"{place}/config.json and [model] differ: {differences}; set {remedy}.")


def config_of(model: ModelConfig, dtype: np.dtype, max_positions: int) -> dict[str, Any]:
    """The config.json of a model, in the fields that both versions of transformers read.

    It is a Qwen3 if the model normalises queries and keys, else a Llama. The number of positions
    limits nothing in the model; those who serve it take it for the longest context.
    """
    qwen3 = model.qk_norm
    own = {"use_sliding_window": False, "sliding_window": None} if qwen3 else {"mlp_bias": False}
    return {
        "architectures": [QWEN3 if qwen3 else LLAMA],
        "model_type": "qwen3" if qwen3 else "llama",
        **{theirs: getattr(model, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model),
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,  # the tokenizer's: Llama's defaults are those of Llama 2
        "eos_token_id": None,
        "torch_dtype": str(dtype),
        **own,
    }


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    if model.rope_factor == 1:
        return None
    factors = {theirs: getattr(model, ours) for theirs, ours in _ROPE.items()}
    return {"rope_type": "llama3"} | factors


def _architecture(theirs: dict[str, Any], place: Path) -> str:
    names = theirs.get("architectures") or [None]
    if names[0] not in (LLAMA, QWEN3):
        raise ConfigError(
            f"{place}/config.json names the architecture {names[0]} but only {LLAMA} and {QWEN3} "
            f"can be imported: take a checkpoint of one of these."
        )
    return names[0]


def _check_plain(theirs: dict[str, Any], place: Path) -> None:
    rope = _rope(theirs)
    kind = _rope_type(rope)
    if kind not in ("default", "llama3"):
        raise ConfigError(
            f"{place}/config.json scales its rotary positions (rope_type {kind!r}) but this model "
            f"has only Llama 3.1's way ('llama3') and none: take another checkpoint."
        )
    given = {"partial_rotary_factor": rope.get("partial_rotary_factor")} | theirs
    for name, allowed in _ABSENT.items():
        if given.get(name, allowed[0]) not in allowed:
            raise ConfigError(
                f"{place}/config.json has {name}={given[name]!r} but this model has only "
                f"{name}={allowed[0]!r}: take another checkpoint."
            )
    if "sliding_attention" in (theirs.get("layer_types") or ()):
        raise ConfigError(
            f"{place}/config.json has layers of sliding_attention but this model attends to all "
            f"tokens in every layer: take another checkpoint."
        )


def _sizes(theirs: dict[str, Any], place: Path) -> dict[str, Any]:
    for name in _SIZES:
        if name not in theirs:
            raise ConfigError(f"{place}/config.json has no {name}: download it again.")
    return {ours: theirs[name] for name, ours in _SIZES.items()}


def _choices(theirs: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Ours, by our names: what has a default in transformers."""
    heads, width = theirs["num_attention_heads"], theirs["hidden_size"]
    llama = architecture == LLAMA
    theta = _rope(theirs).get("rope_theta", theirs.get("rope_theta"))
    return {
        "n_kv_heads": theirs.get("num_key_value_heads") or (heads if llama else 32),
        "head_dim": theirs.get("head_dim") or (width // heads if llama else 128),
        **_rope_choices(_rope(theirs)),
        "norm_eps": theirs.get("rms_norm_eps", 1e-6),
        "rope_theta": theta or 10000.0,
        "qk_norm": not llama,
        "tie_embeddings": theirs.get("tie_word_embeddings", False),
    }


def _rope_choices(rope: dict[str, Any]) -> dict[str, Any]:
    """How long wavelengths are stretched, by our names."""
    if _rope_type(rope) == "default":
        return {"rope_factor": 1.0}
    return {ours: rope.get(theirs) for theirs, ours in _ROPE.items()}


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope(theirs: dict[str, Any]) -> dict[str, Any]:
    return theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}


def _toml(value: Any) -> str:
    return json.dumps(value)
