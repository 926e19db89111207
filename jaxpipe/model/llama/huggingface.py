"""Names and config.json of Llama 3, Qwen3, Qwen3-MoE and Mistral at Hugging Face.

The fields are those of transformers' `LlamaConfig`, `Qwen3Config`, `Qwen3MoeConfig` and
`MistralConfig`, as version 4 writes them (`rope_theta`, `rope_scaling`, `torch_dtype`) and as
version 5 does (`rope_parameters`, `dtype`). An absent field has transformers' default.
"""

from collections.abc import Mapping
from typing import Any

from jaxpipe.model.llama.config import LlamaConfig
from jaxpipe.model.moe import huggingface as experts
from jaxpipe.model.published import HuggingFaceTensor, architecture, check_only, sizes
from jaxpipe.model.rope import huggingface as rope

LLAMA, QWEN3, MISTRAL = "LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"
QWEN3_MOE = "Qwen3MoeForCausalLM"
MODELS = "a plain Llama 3, Qwen3, Qwen3-MoE or Mistral"

BASE, PREFIX = "model.", "model.layers.{}."
LAYER = {
    "attn_norm/scale": HuggingFaceTensor("input_layernorm.weight"),
    "attn/wq": HuggingFaceTensor("self_attn.q_proj.weight", transposed=True),
    "attn/wk": HuggingFaceTensor("self_attn.k_proj.weight", transposed=True),
    "attn/wv": HuggingFaceTensor("self_attn.v_proj.weight", transposed=True),
    "attn/q_norm/scale": HuggingFaceTensor("self_attn.q_norm.weight"),
    "attn/k_norm/scale": HuggingFaceTensor("self_attn.k_norm.weight"),
    "attn/wo": HuggingFaceTensor("self_attn.o_proj.weight", transposed=True),
    "mlp_norm/scale": HuggingFaceTensor("post_attention_layernorm.weight"),
    "mlp/w_gate": HuggingFaceTensor("mlp.gate_proj.weight", transposed=True),
    "mlp/w_up": HuggingFaceTensor("mlp.up_proj.weight", transposed=True),
    "mlp/w_down": HuggingFaceTensor("mlp.down_proj.weight", transposed=True),
    **experts.LAYER,
}
FUSED = experts.FUSED
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ENDS = {
    "embed": HuggingFaceTensor(EMBED),
    "final_norm/scale": HuggingFaceTensor("model.norm.weight"),
    "head": HuggingFaceTensor(HEAD, transposed=True),
}
BUFFERS = (".rotary_emb.inv_freq",)  # in checkpoints of old versions

# Hugging Face's names to ours.
_SIZES = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
    "vocab_size": "vocab_size",
}
# Defaults of absent fields. Where there is none for head_dim, it is hidden_size / heads.
_DEFAULTS: dict[str, dict[str, Any]] = {
    LLAMA: {"bos_token_id": 1, "eos_token_id": 2},
    QWEN3: {"num_key_value_heads": 32, "head_dim": 128},
    QWEN3_MOE: {"num_key_value_heads": 4, **experts.DEFAULTS},
    MISTRAL: {
        "num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2
    },
}  # fmt: skip
ARCHITECTURES = tuple(_DEFAULTS)
# Features that our decoder lacks, and the values with which a checkpoint does not use them.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}


def tied(model: LlamaConfig) -> bool:
    """Whether the head is the transposed embedding."""
    return model.tie_embeddings


def with_defaults(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json with transformers' defaults for absent fields.

    Raises `ValueError` where it names another architecture.
    """
    return _DEFAULTS[architecture(theirs, ARCHITECTURES)] | theirs


def expected(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `[model]` that a config.json implies.

    Raises `ValueError`, with the end of a sentence that begins with the file, where it describes a
    model that this family does not support.
    """
    name, theirs = architecture(theirs, ARCHITECTURES), with_defaults(theirs)
    window = theirs["sliding_window"] or 0 if name == MISTRAL else 0
    _check_plain(theirs, "sliding_attention" if window else "full_attention")
    choices = {"qk_norm": name in (QWEN3, QWEN3_MOE), "sliding_window": window}
    mixture = experts.expected(theirs) if name == QWEN3_MOE else experts.NONE
    return sizes(theirs, _SIZES) | _choices(theirs) | choices | mixture


def trained(theirs: Mapping[str, Any], model: LlamaConfig) -> dict[str, Any]:
    """The fields of `[model]` that only training reads, as a config.json has them."""
    return experts.trained(theirs, model)


def written(model: LlamaConfig, dtype: str, max_positions: int) -> dict[str, Any]:
    """The config.json of a model, in the fields that both versions of transformers read.

    With norms of queries and keys it is a Qwen3, or with experts a Qwen3-MoE; with a window a
    Mistral; else a Llama, which is the same as a Mistral without a window. `max_positions` limits
    nothing in the model; inference servers take it for the longest context.

    Raises `ValueError` with a sentence where no architecture has both norms and a window, or
    experts without norms.
    """
    if model.qk_norm and model.sliding_window:
        raise ValueError(
            f"model.qk_norm=true with model.sliding_window={model.sliding_window}: transformers "
            f"has no plain model with both: it cannot be exported."
        )
    if model.n_experts and not model.qk_norm:
        raise ValueError(
            f"model.n_experts={model.n_experts} with model.qk_norm=false: of transformers' models "
            f"with experts only Qwen3-MoE, which has norms, is known here: it cannot be exported."
        )
    name, kind, own = LLAMA, "llama", {"mlp_bias": False}
    if model.qk_norm:
        name, kind, own = QWEN3, "qwen3", {"use_sliding_window": False, "sliding_window": None}
        if model.n_experts:
            name, kind, own = QWEN3_MOE, "qwen3_moe", own | experts.written(model)
    elif model.sliding_window:
        name, kind, own = MISTRAL, "mistral", {"sliding_window": model.sliding_window}
    return {
        "architectures": [name],
        "model_type": kind,
        **{theirs: getattr(model, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        **rope.written(model, max_positions),
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,  # unknown; absent fields would mean the tokens of Llama 2
        "eos_token_id": None,
        "torch_dtype": dtype,
        **own,
    }


def _check_plain(theirs: Mapping[str, Any], attention: str) -> None:
    """Raise `ValueError` for features that our decoder lacks, or layers of other `attention`."""
    partial = {"partial_rotary_factor": rope.rope_fields(theirs).get("partial_rotary_factor")}
    check_only(partial | theirs, _ABSENT)
    for other in {*(theirs.get("layer_types") or ())} - {attention}:
        raise ValueError(
            f"has layers of {other} but all of this model's are of {attention}: take another "
            f"checkpoint."
        )


def _choices(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with defaults in transformers, by our names."""
    heads = theirs["num_attention_heads"]
    return {
        "n_kv_heads": theirs.get("num_key_value_heads") or heads,
        "head_dim": theirs.get("head_dim") or theirs["hidden_size"] // heads,
        **rope.expected(theirs),
        "norm_eps": theirs.get("rms_norm_eps", 1e-6),
        "tie_embeddings": theirs.get("tie_word_embeddings", False),
    }
