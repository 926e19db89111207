"""Names and config.json of DeepSeek-V2, V3 and V3.2, of V3's likes (Kimi-K2), and of GLM-5.

The fields are those of transformers' `DeepseekV2Config`, `DeepseekV3Config`, `DeepseekV32Config`
and `GlmMoeDsaConfig`, and those that only DeepSeek's own code reads, where they are given
(`scoring_func`, `topk_method`, `aux_loss_alpha`). An absent field has transformers' default.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.layers.moe import huggingface as experts
from jaxpipe.model.layers.moe.huggingface import FUSED as FUSED  # the same tensors for all experts
from jaxpipe.model.layers.moe.huggingface import VARIABLES as VARIABLES
from jaxpipe.model.layers.rope import huggingface as rope
from jaxpipe.model.prediction.huggingface import check_depth, with_prediction
from jaxpipe.model.prediction.huggingface import ignores as ignores
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

V2, V3, V32 = (f"Deepseek{version}ForCausalLM" for version in ("V2", "V3", "V32"))
GLM = "GlmMoeDsaForCausalLM"
_TYPES = {V2: "deepseek_v2", V3: "deepseek_v3", V32: "deepseek_v32", GLM: "glm_moe_dsa"}
ARCHITECTURES = (V2, V3, V32, GLM)
MODELS = "a DeepSeek-V2, V3 or V3.2, or a GLM-5"

BASE, PREFIX = "model.", "model.layers.{}."


def matrix(name: str) -> HuggingFaceTensor:
    """The transposed weight of a linear map of that name."""
    return HuggingFaceTensor(f"{name}.weight", transposed=True)


_BLOCK = {
    "attn_norm/scale": HuggingFaceTensor("input_layernorm.weight"),
    "attn/wq": matrix("self_attn.q_proj"),
    "attn/wq_a": matrix("self_attn.q_a_proj"),
    "attn/q_norm/scale": HuggingFaceTensor("self_attn.q_a_layernorm.weight"),
    "attn/wq_b": matrix("self_attn.q_b_proj"),
    "attn/wkv_a": matrix("self_attn.kv_a_proj_with_mqa"),
    "attn/kv_norm/scale": HuggingFaceTensor("self_attn.kv_a_layernorm.weight"),
    "attn/wkv_b": matrix("self_attn.kv_b_proj"),
    "attn/wo": matrix("self_attn.o_proj"),
    "attn/indexer/wq": matrix("self_attn.indexer.wq_b"),
    "attn/indexer/wk": matrix("self_attn.indexer.wk"),
    "attn/indexer/k_norm/scale": HuggingFaceTensor("self_attn.indexer.k_norm.weight"),
    "attn/indexer/k_norm/bias": HuggingFaceTensor("self_attn.indexer.k_norm.bias"),
    "attn/indexer/weights": matrix("self_attn.indexer.weights_proj"),
    "mlp_norm/scale": HuggingFaceTensor("post_attention_layernorm.weight"),
    "mlp/w_gate": matrix("mlp.gate_proj"),
    "mlp/w_up": matrix("mlp.up_proj"),
    "mlp/w_down": matrix("mlp.down_proj"),
    **experts.SHARED,
    **experts.LAYER,
}
LAYER = with_prediction(_BLOCK)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ENDS = {
    "embed": HuggingFaceTensor(EMBED),
    "final_norm/scale": HuggingFaceTensor("model.norm.weight"),
    "head": HuggingFaceTensor(HEAD, transposed=True),
}
CHOICES: dict[str, Any] = {}

# Hugging Face's names to ours.
_SIZES = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff",
    "vocab_size": "vocab_size",
}
_CHOICES = {
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    **experts.FIELDS,
}
_INDEXER = ("index_topk", "index_n_heads", "index_head_dim")
_OF_BOTH = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_OF_V3: dict[str, Any] = _OF_BOTH | {
    "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "max_position_embeddings": 4096, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    V2: _OF_BOTH | {
        "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
        "n_group": None, "topk_group": None, "topk_method": "greedy", "scoring_func": "softmax",
        "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
    },
    V3: _OF_V3,
    V32: _OF_V3 | {
        "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
        "max_position_embeddings": 163840,
    },
    GLM: _OF_V3 | {
        "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
        "n_group": 1, "topk_group": 1, "index_topk": 2048, "index_n_heads": 32,
        "index_head_dim": 128, "max_position_embeddings": 202752, "eos_token_id": 1,
    },
}  # fmt: skip
# Features that our decoder lacks, and the values with which a checkpoint does not use them.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "moe_router_dtype": ("float32",),
}
_OF_SIGMOID = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_ALONE = {"index_topk_freq": (1,), "index_topk_pattern": (None,)}  # every layer has an indexer
_ROUTERS: dict[str, dict[str, tuple[Any, ...]]] = {
    V2: {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False, None),
        **_ALONE,
    },
    V3: _OF_SIGMOID | _ALONE,
    V32: _OF_SIGMOID | _ALONE | {"indexer_rope_interleave": (False,)},
    GLM: _OF_SIGMOID | {"indexer_rope_interleave": (True,)},
}
# Read elsewhere, or without effect in latent attention and in one process.
_READ = (
    "max_position_embeddings", "quantization_config", "topk_method", "scoring_func",
    "num_experts_per_tok", "num_nextn_predict_layers", "aux_loss_alpha", "seq_aux", "ep_size",
    "num_key_value_heads", "head_dim", "qk_head_dim", "mlp_layer_types", "layer_types",
    "indexer_types", "indexer_rope_interleave", "index_skip_topk_offset", "index_topk_freq",
    "index_topk_pattern", "index_share_for_mtp_iteration",
    *rope.FIELDS,
)  # fmt: skip


def describes(model: DeepseekConfig) -> bool:
    """Whether one of the architectures may be a model's: `written` refuses others."""
    return True


def tied(model: DeepseekConfig) -> bool:
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
    check_only(theirs, _ABSENT | _ROUTERS[name])
    check_quantised(theirs)
    indexer = _INDEXER if name in (V32, GLM) else ()
    check_known(theirs, {*_READ, *_SIZES, *_CHOICES, *_ABSENT, *indexer})
    _check_layers(theirs)
    needed = sizes(theirs, _SIZES | {"num_experts_per_tok": "experts_per_token"})
    ours = {own: theirs[field] for field, own in _CHOICES.items()}
    ours |= dict.fromkeys(_INDEXER, 0) | {field: theirs[field] for field in indexer}
    ours["index_rotates_neighbours"] = name == GLM
    if name == GLM:
        ours |= _index_groups(theirs)
    if theirs["topk_method"] == "greedy":
        ours |= {"expert_groups": None, "groups_per_token": None}
    return needed | ours | _router(name, ours) | rope.expected(theirs)


def _check_layers(theirs: Mapping[str, Any]) -> None:
    """Raise `ValueError` where the kinds of single layers are not those of the other fields."""
    layers, dense = theirs["num_hidden_layers"], theirs["first_k_dense_replace"]
    kinds = {
        "mlp_layer_types": ["dense"] * min(dense, layers) + ["sparse"] * (layers - dense),
        "layer_types": ["indexed_attention"] * layers,
    }
    for name, usual in kinds.items():
        if theirs.get(name) not in (None, usual):
            raise ValueError(
                f"has {name}={theirs[name]}, but here the first layers alone are dense, and all "
                f"have the same attention: take another checkpoint."
            )


def _index_groups(theirs: Mapping[str, Any]) -> dict[str, int]:
    """The groups of layers that share the keys of an indexer, as transformers reads them.

    Raises `ValueError` where they are not of one length, after layers that share with none.
    """
    layers, pattern = theirs["num_hidden_layers"], theirs.get("index_topk_pattern")
    types = theirs.get("indexer_types") or pattern
    if types is None:
        freq, offset = theirs.get("index_topk_freq", 1), theirs.get("index_skip_topk_offset", 2)
        types = ["F" if max(i - offset + 1, 0) % max(freq, 1) == 0 else "S" for i in range(layers)]
    first = [i for i, kind in enumerate(types) if kind in ("F", "full")]
    lengths = [end - begin for begin, end in pairwise((*first, layers))]
    group = max(lengths, default=1)
    alone = next((i for i, length in zip(first, lengths) if length > 1), 0)
    if [*range(alone), *range(alone, layers, group)] != first:
        raise ValueError(
            f"has indexers in the layers {first} alone, but here groups of equally many layers "
            f"share one, after layers that have their own: take another checkpoint."
        )
    return {"index_group": group, "index_first": alone}


def _router(name: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the router that the architecture implies, or that are null."""
    return {
        "q_lora_rank": ours["q_lora_rank"] or 0,
        "norm_topk_prob": bool(ours["norm_topk_prob"]),
        "expert_groups": ours["expert_groups"] or 1,
        "groups_per_token": ours["groups_per_token"] or 1,
        "group_score_experts": 1 if name == V2 else 2,
        "router_score": "softmax" if name == V2 else "sigmoid",
        "router_bias": name != V2,
        "moe_every": 1,
    }


def trained(theirs: Mapping[str, Any], model: DeepseekConfig) -> dict[str, Any]:
    """`router_aux_loss` of `[model]`, from DeepSeek's `aux_loss_alpha` of a loss per sequence."""
    if not theirs.get("seq_aux") or (alpha := theirs.get("aux_loss_alpha")) is None:
        return {}
    return {"router_aux_loss": alpha}


def written(model: DeepseekConfig, dtype: str, max_positions: int) -> dict[str, Any]:
    """The config.json of a model, in the fields that both versions of transformers read.

    With an indexer it is a DeepSeek-V3.2, or a GLM-5 if that rotates neighbours, else with
    `router_score="sigmoid"` a DeepSeek-V3, else a DeepSeek-V2.

    Raises `ValueError` with a sentence where none can express the model.
    """
    name = V3 if model.router_score == "sigmoid" else V2
    if model.index_topk:
        name = GLM if model.index_rotates_neighbours else V32
    _check_written(name, model)
    fields = {theirs: getattr(model, ours) for theirs, ours in (_SIZES | _CHOICES).items()}
    in_groups = model.expert_groups > 1
    greedy = "group_limited_greedy" if in_groups else "greedy"
    indexer = {field: getattr(model, field) for field in _INDEXER if model.index_topk}
    if name == GLM:
        first = model.first_blocks
        indexer["indexer_types"] = [
            "full" if i in first else "shared" for i in range(model.n_layers)
        ]
    return {
        "architectures": [name],
        "model_type": _TYPES[name],
        **fields,
        **indexer,
        "moe_intermediate_size": model.expert_width,
        "q_lora_rank": model.q_lora_rank or None,
        "num_key_value_heads": model.n_heads,
        "hidden_act": "silu",
        **rope.written(model, max_positions),
        "rope_interleave": True,
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "moe_layer_freq": 1,
        "scoring_func": model.router_score,
        "topk_method": greedy if name == V2 else "noaux_tc",
        "aux_loss_alpha": model.router_aux_loss,
        "seq_aux": True,
        "num_nextn_predict_layers": model.mtp_depth,
        "bos_token_id": None,  # unknown; absent fields would mean those of DeepSeek
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _check_written(name: str, model: DeepseekConfig) -> None:
    needed: dict[str, Any] = {"moe_every": 1} | ({"index_group": 1} if name != GLM else {})
    if name != V2:
        needed |= {"group_score_experts": 2, "has_router_bias": True, "router_score": "sigmoid"}
    else:
        needed |= {"norm_topk_prob": False, "has_router_bias": False, "router_score": "softmax"}
        if model.expert_groups > 1:
            needed["group_score_experts"] = 1
    check_depth(model)
    if not model.n_experts or not model.shared_experts:
        raise ValueError(
            f"model.n_experts={model.n_experts} with model.shared_experts={model.shared_experts}: "
            f"transformers' DeepSeek models have both kinds of experts: it cannot be exported."
        )
    check_choices(model, needed, f"models with model.router_score={model.router_score!r}")
