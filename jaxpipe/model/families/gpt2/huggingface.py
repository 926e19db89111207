"""Names and config.json of GPT-2 at Hugging Face: the fields of transformers' `GPT2Config`.

Its matrices are those of a `Conv1D`, `[in, out]` like ours, and queries, keys and values are one
tensor. Dropout rates are not read from a config.json, and are written as 0.
"""

from collections.abc import Mapping
from typing import Any

from jaxpipe.model import published
from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.model.published import HuggingFaceTensor, architecture, check_known, check_only, sizes

GPT2 = "GPT2LMHeadModel"
ARCHITECTURES = (GPT2,)
MODELS = "a GPT-2"

BASE, PREFIX = "transformer.", "transformer.h.{}."
LAYER = {
    "attn_norm/scale": HuggingFaceTensor("ln_1.weight"),
    "attn_norm/bias": HuggingFaceTensor("ln_1.bias"),
    "attn/wq": HuggingFaceTensor("attn.c_attn.weight", part=0),
    "attn/wk": HuggingFaceTensor("attn.c_attn.weight", part=1),
    "attn/wv": HuggingFaceTensor("attn.c_attn.weight", part=2),
    "attn/bq": HuggingFaceTensor("attn.c_attn.bias", part=0),
    "attn/bk": HuggingFaceTensor("attn.c_attn.bias", part=1),
    "attn/bv": HuggingFaceTensor("attn.c_attn.bias", part=2),
    "attn/wo": HuggingFaceTensor("attn.c_proj.weight"),
    "attn/bo": HuggingFaceTensor("attn.c_proj.bias"),
    "mlp_norm/scale": HuggingFaceTensor("ln_2.weight"),
    "mlp_norm/bias": HuggingFaceTensor("ln_2.bias"),
    "mlp/w_up": HuggingFaceTensor("mlp.c_fc.weight"),
    "mlp/b_up": HuggingFaceTensor("mlp.c_fc.bias"),
    "mlp/w_down": HuggingFaceTensor("mlp.c_proj.weight"),
    "mlp/b_down": HuggingFaceTensor("mlp.c_proj.bias"),
}
EMBED, HEAD = "transformer.wte.weight", "lm_head.weight"
ENDS = {
    "embed": HuggingFaceTensor(EMBED),
    "positions": HuggingFaceTensor("transformer.wpe.weight"),
    "final_norm/scale": HuggingFaceTensor("transformer.ln_f.weight"),
    "final_norm/bias": HuggingFaceTensor("transformer.ln_f.bias"),
}
FUSED: dict[str, HuggingFaceTensor] = {}
CHOICES: dict[str, Any] = {}
BUFFERS = (*published.BUFFERS, ".attn.bias")  # causal masks

# Hugging Face's names to ours.
_SIZES = {
    "n_layer": "n_layers",
    "n_embd": "d_model",
    "n_head": "n_heads",
    "n_positions": "max_seq_len",
    "vocab_size": "vocab_size",
}
# The only values that our model supports, of which the first is transformers' default.
_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
}
# Read, or without effect: the head of a classifier, and the precision of scores.
_KNOWN = {
    *_SIZES, *_ONLY, "n_inner", "layer_norm_epsilon", "n_ctx", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "reorder_and_upcast_attn", "summary_type", "summary_use_proj",
    "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
}  # fmt: skip


def describes(model: GPT2Config) -> bool:
    """Whether it is a GPT-2: every model of the family is."""
    return True


def tied(model: GPT2Config) -> bool:
    """Whether the head is the transposed embedding: always."""
    return True


def with_defaults(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json with transformers' defaults for absent fields.

    Raises `ValueError` where it names another architecture.
    """
    architecture(theirs, ARCHITECTURES)
    return {"bos_token_id": 50256, "eos_token_id": 50256} | theirs


def expected(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `[model]` that a config.json implies.

    Raises `ValueError`, with the end of a sentence that begins with the file, where it describes a
    model that this family does not support.
    """
    theirs = with_defaults(theirs)
    check_only(theirs, _ONLY)
    check_known(theirs, _KNOWN)
    found = sizes(theirs, _SIZES)
    return found | {
        "head_dim": found["d_model"] // found["n_heads"],
        "d_ff": theirs.get("n_inner") or 4 * found["d_model"],
        "norm_eps": theirs.get("layer_norm_epsilon", 1e-5),
    }


def trained(theirs: Mapping[str, Any], model: GPT2Config) -> dict[str, Any]:
    """The fields of `[model]` that only training reads, as a config.json has them: none."""
    return {}


def written(model: GPT2Config, dtype: str, max_positions: int) -> dict[str, Any]:
    """The config.json of a model, in the fields that versions 4 and 5 of transformers read.

    Raises `ValueError` with a sentence where it cannot describe the model.
    """
    if max_positions != model.max_seq_len:
        raise ValueError(
            f"--max-positions {max_positions} but the model has learned {model.max_seq_len} "
            f"positions: leave it out."
        )
    if model.n_heads * model.head_size != model.d_model:
        raise ValueError(
            f"model.n_heads={model.n_heads} of model.head_dim={model.head_size} do not make up "
            f"model.d_model={model.d_model}, and {GPT2} has no other heads: it cannot be exported."
        )
    return {
        "architectures": [GPT2],
        "model_type": "gpt2",
        **{theirs: getattr(model, ours) for theirs, ours in _SIZES.items()},
        "n_ctx": model.max_seq_len,  # other programs read it
        "n_inner": model.d_ff,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,  # unknown
        "eos_token_id": None,
        "torch_dtype": dtype,
    }
