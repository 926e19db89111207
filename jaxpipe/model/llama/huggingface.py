"""Llama 3 and Qwen3 as Hugging Face names and describes them.

What is read are the fields of transformers' `LlamaConfig` and `Qwen3Config`, as version 4 writes
them (`rope_theta`, `rope_scaling`, `torch_dtype`) and as version 5 does (`rope_parameters`,
`dtype`). A field that is absent has transformers' default.
"""

from collections.abc import Mapping
from typing import Any

from jaxpipe.model.llama.config import LlamaConfig

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
MODELS = "a plain Llama 3 or Qwen3"

# Ours, theirs, and whether one is the other transposed.
LAYER = {
    "attn_norm/scale": ("input_layernorm", False),
    "attn/wq": ("self_attn.q_proj", True),
    "attn/wk": ("self_attn.k_proj", True),
    "attn/wv": ("self_attn.v_proj", True),
    "attn/q_norm/scale": ("self_attn.q_norm", False),
    "attn/k_norm/scale": ("self_attn.k_norm", False),
    "attn/wo": ("self_attn.o_proj", True),
    "mlp_norm/scale": ("post_attention_layernorm", False),
    "mlp/w_gate": ("mlp.gate_proj", True),
    "mlp/w_up": ("mlp.up_proj", True),
    "mlp/w_down": ("mlp.down_proj", True),
}
ENDS = {
    "embed": ("model.embed_tokens", False),
    "final_norm/scale": ("model.norm", False),
    "head": ("lm_head", True),
}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

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


def tied(model: LlamaConfig) -> bool:
    """Whether the head is the embedding."""
    return model.tie_embeddings


def expected(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `[model]` that a config.json asks for.

    Raises `ValueError` with the end of a sentence that begins with the file, where it describes a
    model that ours is not.
    """
    architecture = _architecture(theirs)
    _check_plain(theirs)
    return _sizes(theirs) | _choices(theirs, architecture)


def written(model: LlamaConfig, dtype: str, max_positions: int) -> dict[str, Any]:
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
        "torch_dtype": dtype,
        **own,
    }


def _rope_scaling(model: LlamaConfig) -> dict[str, Any] | None:
    if model.rope_factor == 1:
        return None
    factors = {theirs: getattr(model, ours) for theirs, ours in _ROPE.items()}
    return {"rope_type": "llama3"} | factors


def _architecture(theirs: Mapping[str, Any]) -> str:
    names = theirs.get("architectures") or [None]
    if names[0] not in (LLAMA, QWEN3):
        raise ValueError(
            f"names the architecture {names[0]} but only {LLAMA} and {QWEN3} "
            f"can be imported: take a checkpoint of one of these."
        )
    return names[0]


def _check_plain(theirs: Mapping[str, Any]) -> None:
    rope = _rope(theirs)
    kind = _rope_type(rope)
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"scales its rotary positions (rope_type {kind!r}) but this model "
            f"has only Llama 3.1's way ('llama3') and none: take another checkpoint."
        )
    given = {"partial_rotary_factor": rope.get("partial_rotary_factor")} | theirs
    for name, allowed in _ABSENT.items():
        if given.get(name, allowed[0]) not in allowed:
            raise ValueError(
                f"has {name}={given[name]!r} but this model has only "
                f"{name}={allowed[0]!r}: take another checkpoint."
            )
    if "sliding_attention" in (theirs.get("layer_types") or ()):
        raise ValueError(
            "has layers of sliding_attention but this model attends to all "
            "tokens in every layer: take another checkpoint."
        )


def _sizes(theirs: Mapping[str, Any]) -> dict[str, Any]:
    for name in _SIZES:
        if name not in theirs:
            raise ValueError(f"has no {name}: download it again.")
    return {ours: theirs[name] for name, ours in _SIZES.items()}


def _choices(theirs: Mapping[str, Any], architecture: str) -> dict[str, Any]:
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


def _rope_choices(rope: Mapping[str, Any]) -> dict[str, Any]:
    """How long wavelengths are stretched, by our names."""
    if _rope_type(rope) == "default":
        return {"rope_factor": 1.0}
    return {ours: rope.get(theirs) for theirs, ours in _ROPE.items()}


def _rope_type(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    return theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
