"""Names and config.json of Kimi Linear, as it is published and as transformers writes them.

Published files have `linear_attn_config`, which counts layers from 1, and `first_k_dense_replace`;
transformers 5.24 writes `layer_types`, `mlp_layer_types` and `linear_*` in their place. An absent
field has transformers' default.
"""

from collections.abc import Mapping
from typing import Any

from jaxpipe.model.families.deepseek import huggingface as deepseek
from jaxpipe.model.families.deepseek.huggingface import matrix
from jaxpipe.model.families.kimi_linear.config import KimiLinearConfig
from jaxpipe.model.families.llama.huggingface import FULL, LlamaFormat
from jaxpipe.model.published import BUFFERS as BUFFERS
from jaxpipe.model.published import (
    HuggingFaceTensor,
    architecture,
    check_choices,
    check_known,
    check_only,
    check_quantised,
    sizes,
)
from jaxpipe.model.recurrent.config import is_linear
from jaxpipe.model.recurrent.huggingface import LINEAR

ARCHITECTURES = ("KimiLinearForCausalLM",)
MODELS = "a Kimi Linear"
BASE, PREFIX = deepseek.BASE, deepseek.PREFIX
EMBED, HEAD, ENDS = deepseek.EMBED, deepseek.HEAD, deepseek.ENDS
CHOICES: dict[str, Any] = {}
_EXPERTS = "block_sparse_moe."

LAYER = {
    **{path: deepseek.LAYER[path] for path in deepseek.LAYER if path.startswith(("attn", "mlp"))},
    **{f"delta/w{one}": matrix(f"self_attn.{one}_proj") for one in "qkvo"},
    **{f"delta/conv_{one}": matrix(f"self_attn.{one}_conv1d")._replace(ones=(1,)) for one in "qkv"},
    "delta/rate": matrix("self_attn.b_proj"),
    "delta/decay_a": matrix("self_attn.f_a_proj"),
    "delta/decay_b": matrix("self_attn.f_b_proj"),
    "delta/decay_bias": HuggingFaceTensor("self_attn.dt_bias"),
    "delta/log_decay": HuggingFaceTensor("self_attn.A_log", ones=(0, 1, 3)),
    "delta/gate_a": matrix("self_attn.g_a_proj"),
    "delta/gate_b": matrix("self_attn.g_b_proj"),
    "delta/norm/scale": HuggingFaceTensor("self_attn.o_norm.weight"),
    "moe/router/gate": matrix(f"{_EXPERTS}gate"),
    **{
        f"moe/experts/{ours}": matrix(f"{_EXPERTS}experts.{{}}.{theirs}")
        for ours, theirs in (("w_gate", "w1"), ("w_up", "w3"), ("w_down", "w2"))
    },
    **{
        f"moe/shared/w_{one}": matrix(f"{_EXPERTS}shared_experts.{one}_proj")
        for one in ("gate", "up", "down")
    },
}
# transformers names the MLP of a dense layer as it does experts.
FUSED = {f"mlp/w_{one}": matrix(f"{_EXPERTS}{one}_proj") for one in ("gate", "up", "down")}
VARIABLES = {"router_bias": HuggingFaceTensor(f"{_EXPERTS}gate.e_score_correction_bias")}

_SIZES = LlamaFormat.SIZES
# Fields with transformers' defaults, and ours.
_FIELDS: dict[str, tuple[Any, str]] = {
    "kv_lora_rank": (512, "kv_lora_rank"),
    "q_lora_rank": (None, "q_lora_rank"),
    "qk_nope_head_dim": (128, "qk_nope_head_dim"),
    "qk_rope_head_dim": (64, "qk_rope_head_dim"),
    "v_head_dim": (128, "v_head_dim"),
    "rms_norm_eps": (1e-5, "norm_eps"),
    "num_experts": (256, "n_experts"),
    "num_experts_per_token": (8, "experts_per_token"),
    "num_shared_experts": (1, "shared_experts"),
    "moe_intermediate_size": (1024, "d_expert"),
    "moe_renormalize": (True, "norm_topk_prob"),
    "routed_scaling_factor": (2.446, "router_scale"),
    "num_expert_group": (1, "expert_groups"),
    "topk_group": (1, "groups_per_token"),
    "linear_num_heads": (32, "delta_heads"),
    "linear_head_dim": (128, "delta_head_dim"),
    "linear_conv_kernel_dim": (4, "delta_taps"),
}
# Those of published files within their `linear_attn_config`.
_LINEAR = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_TYPES = {"full_attn_layers": FULL, "kda_layers": LINEAR}
# Features that our decoder lacks, and the values with which a checkpoint does not use them.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "mla_use_nope": (True,),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "num_nextn_predict_layers": (0, None),
}
# Read elsewhere, or without effect: nothing rotates, and one group is all experts.
_READ = (
    "linear_attn_config", "layer_types", "mlp_layer_types", "first_k_dense_replace",
    "max_position_embeddings", "quantization_config", "num_key_value_heads", "head_dim",
    "qk_head_dim", "rope_theta", "rope_scaling", "use_grouped_topk",
)  # fmt: skip
# What a Kimi Linear has in one way alone.
_ONLY = {
    "has_router_bias": True, "router_score": "sigmoid", "group_score_experts": 2, "moe_every": 1,
}  # fmt: skip


def describes(model: KimiLinearConfig) -> bool:
    """Whether the architecture may be a model's: `written` refuses others."""
    return True


def tied(model: KimiLinearConfig) -> bool:
    """Whether the head is the transposed embedding."""
    return False


def with_defaults(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json in the fields of transformers, with its defaults for absent ones.

    Raises `ValueError` where it names another architecture.
    """
    architecture(theirs, ARCHITECTURES)
    own = theirs.get("linear_attn_config") or {}
    found = {name: default for name, (default, _) in _FIELDS.items()} | theirs
    found |= {ours: own[name] for name, ours in _LINEAR.items() if name in own}
    found["max_position_embeddings"] = theirs.get("model_max_length", 1048576)
    layers = theirs.get("num_hidden_layers")
    if isinstance(layers, int):
        every_fourth = [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)]
        types = _published_types(own, layers) or theirs.get("layer_types") or every_fourth
        dense = min(theirs.get("first_k_dense_replace", 1), layers)
        usual = ["dense"] * dense + ["sparse"] * (layers - dense)
        mlps = theirs.get("mlp_layer_types") or usual
        found |= {"layer_types": types, "mlp_layer_types": mlps}
    return found


def _published_types(own: Mapping[str, Any], layers: int) -> list[str | None]:
    """The types of layers that a `linear_attn_config` lists; empty if it lists none."""
    if not own.keys() >= _TYPES.keys():
        return []
    types = {i: kind for name, kind in _TYPES.items() for i in own[name]}
    return [types.get(i) for i in range(1, layers + 1)]


def expected(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `[model]` that a config.json implies.

    Raises `ValueError`, with the end of a sentence that begins with the file, where it describes a
    model that this family does not support.
    """
    theirs = with_defaults(theirs)
    check_only(theirs, _ABSENT)
    check_quantised(theirs)
    check_known(theirs, {*_READ, *_SIZES, *_FIELDS, *_ABSENT})
    known = {*_LINEAR, *_TYPES}
    check_known(theirs.get("linear_attn_config") or {}, known, " in its linear_attn_config")
    needed = sizes(theirs, _SIZES)
    ours = {own: theirs[name] for name, (_, own) in _FIELDS.items()}
    ours |= {"q_lora_rank": ours["q_lora_rank"] or 0, "router_bias": True}
    ours |= {name: value for name, value in _ONLY.items() if name != "has_router_bias"}
    return needed | ours | _expected_layers(theirs)


def _expected_layers(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have latent attention, and which have an MLP.

    Raises `ValueError` where layers are not as in this family.
    """
    types, mlps = theirs["layer_types"], theirs["mlp_layer_types"]
    layers, every = len(types), types.index(FULL) + 1 if FULL in types else 1
    regular = [FULL if i % every == 0 or i == layers else LINEAR for i in range(1, layers + 1)]
    if types != regular:
        raise ValueError(
            f"has layers of the types {types}, but here every n-th and the last have {FULL} and "
            f"the others {LINEAR}: take another checkpoint."
        )
    dense = mlps.count("dense")
    if mlps != ["dense"] * dense + ["sparse"] * (len(types) - dense):
        raise ValueError(
            f"has mlp_layer_types={mlps}, but here the first layers alone are dense: take another "
            f"checkpoint."
        )
    return {"attention_every": every, "first_dense_layers": dense}


def trained(theirs: Mapping[str, Any], model: KimiLinearConfig) -> dict[str, Any]:
    """Nothing: a config.json says nothing of losses of routers."""
    return {}


def written(model: KimiLinearConfig, dtype: str, max_positions: int) -> dict[str, Any]:
    """The config.json of a model, as it is published.

    Raises `ValueError` with a sentence where the architecture cannot express the model.
    """
    check_choices(model, _ONLY, f"the experts of {MODELS}")
    if not model.shared_experts:
        raise ValueError(
            "model.shared_experts=0, but a Kimi Linear has one: it cannot be exported."
        )
    resolved, kinds = model.resolved(), list(enumerate(model.layer_kinds, 1))
    fields = {name: getattr(resolved, own) for name, own in _SIZES.items()}
    fields |= {name: getattr(resolved, own) for name, (_, own) in _FIELDS.items()}
    linear: dict[str, Any] = {name: fields.pop(field) for name, field in _LINEAR.items()}
    linear["full_attn_layers"] = [i for i, kind in kinds if not is_linear(kind)]
    linear["kda_layers"] = [i for i, kind in kinds if is_linear(kind)]
    return {
        "architectures": [*ARCHITECTURES],
        "model_type": "kimi_linear",
        **fields,
        "q_lora_rank": model.q_lora_rank or None,
        "linear_attn_config": linear,
        "first_k_dense_replace": model.first_dense_layers,
        "num_key_value_heads": model.n_heads,
        "hidden_act": "silu",
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "tie_word_embeddings": False,
        "model_max_length": max_positions,
        "bos_token_id": None,  # unknown; absent fields would mean those of Kimi Linear
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
