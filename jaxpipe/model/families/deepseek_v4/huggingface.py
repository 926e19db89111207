"""Names and config.json of DeepSeek-V4, as transformers writes them and as they are published.

transformers 5.24 has `layer_types`, `compress_rates`, `mlp_layer_types` and `rope_parameters` by
type of layer; published files have `compress_ratios`, `num_hash_layers` and one `rope_scaling`. An
absent field has transformers' default.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpipe.model.families.deepseek_v4.config import Attention, DeepseekV4Config
from jaxpipe.model.layers.gated import LIMIT
from jaxpipe.model.layers.moe.huggingface import check_expressible
from jaxpipe.model.layers.rope import huggingface as rope
from jaxpipe.model.published import BUFFERS as BUFFERS
from jaxpipe.model.published import (
    HuggingFaceTensor,
    architecture,
    check_known,
    check_only,
    check_quantised,
    sizes,
)

ARCHITECTURES = ("DeepseekV4ForCausalLM",)
MODELS = "a DeepSeek-V4"
BASE, PREFIX = "model.", "model.layers.{}."


def _matrix(name: str) -> HuggingFaceTensor:
    return HuggingFaceTensor(name, transposed=True)


def _hyper(ours: str, theirs: str) -> dict[str, HuggingFaceTensor]:
    return {
        f"{ours}/weights": _matrix(f"{theirs}_fn"),
        f"{ours}/base": HuggingFaceTensor(f"{theirs}_base"),
        f"{ours}/scale": HuggingFaceTensor(f"{theirs}_scale"),
    }


def _compressor(ours: str, theirs: str) -> dict[str, HuggingFaceTensor]:
    return {
        f"{ours}/wkv": _matrix(f"{theirs}.wkv.weight"),
        f"{ours}/wgate": _matrix(f"{theirs}.wgate.weight"),
        f"{ours}/bias": HuggingFaceTensor(f"{theirs}.ape"),
        f"{ours}/norm/scale": HuggingFaceTensor(f"{theirs}.norm.weight"),
    }


_EXPERT = {"w_gate": "w1", "w_up": "w3", "w_down": "w2"}
LAYER = {
    "attn_norm/scale": HuggingFaceTensor("attn_norm.weight"),
    "mlp_norm/scale": HuggingFaceTensor("ffn_norm.weight"),
    "attn/q_norm/scale": HuggingFaceTensor("attn.q_norm.weight"),
    "attn/kv_norm/scale": HuggingFaceTensor("attn.kv_norm.weight"),
    "attn/sinks": HuggingFaceTensor("attn.attn_sink"),
    **{f"attn/{w}": _matrix(f"attn.{w}.weight") for w in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")},
    **_compressor("attn/entries", "attn.compressor"),
    **_compressor("attn/indexer/entries", "attn.indexer.compressor"),
    "attn/indexer/wq": _matrix("attn.indexer.wq_b.weight"),
    "attn/indexer/weights": _matrix("attn.indexer.weights_proj.weight"),
    **_hyper("mixer_residual", "hc_attn"),
    **_hyper("mlp_residual", "hc_ffn"),
    "moe/router/gate": _matrix("ffn.gate.weight"),
    **{f"moe/experts/{w}": _matrix(f"ffn.experts.{{}}.{w_n}.weight") for w, w_n in _EXPERT.items()},
    **{
        f"moe/shared/{w}": _matrix(f"ffn.shared_experts.{w_n}.weight") for w, w_n in _EXPERT.items()
    },
}
VARIABLES = {
    "router_bias": HuggingFaceTensor("ffn.gate.bias"),
    "token_experts": HuggingFaceTensor("ffn.gate.tid2eid"),
}
EMBED, HEAD = "model.embed_tokens.weight", "head.weight"
ENDS = {
    "embed": HuggingFaceTensor(EMBED),
    "final_norm/scale": HuggingFaceTensor("model.norm.weight"),
    "head": _matrix(HEAD),
    **_hyper("collapse", "model.hc_head.hc"),
}
# Files of transformers 5.24 have another name of the norm, and DeepSeek's others of what follows.
FUSED = {
    "attn/kv_norm/scale": HuggingFaceTensor("attn.norm.weight"),
    "embed": HuggingFaceTensor("model.embed.weight"),
    **_hyper("collapse", "model.hc_head"),
}
CHOICES: dict[str, Any] = {}

_SIZES = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "vocab_size": "vocab_size",
}
# Fields with transformers' defaults, and ours.
_FIELDS: dict[str, tuple[Any, str]] = {
    "moe_intermediate_size": (2048, "d_ff"),
    "head_dim": (512, "head_dim"),
    "q_lora_rank": (1024, "q_lora_rank"),
    "o_groups": (8, "o_groups"),
    "o_lora_rank": (1024, "o_lora_rank"),
    "sliding_window": (128, "sliding_window"),
    "index_n_heads": (64, "index_n_heads"),
    "index_head_dim": (128, "index_head_dim"),
    "index_topk": (512, "index_topk"),
    "rms_norm_eps": (1e-6, "norm_eps"),
    "hc_mult": (4, "hc_mult"),
    "hc_sinkhorn_iters": (20, "hc_sinkhorn_iters"),
    "hc_eps": (1e-6, "hc_eps"),
    "n_routed_experts": (256, "n_experts"),
    "num_experts_per_tok": (6, "experts_per_token"),
    "n_shared_experts": (1, "shared_experts"),
    "norm_topk_prob": (True, "norm_topk_prob"),
    "routed_scaling_factor": (1.5, "router_scale"),
}
# Features that our decoder lacks, and the values with which a checkpoint does not use them.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "num_key_value_heads": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "swiglu_limit": (LIMIT,),
    "router_jitter_noise": (0.0,),
}
_READ = (
    "max_position_embeddings", "quantization_config", "num_nextn_predict_layers", "layer_types",
    "mlp_layer_types", "compress_rates", "compress_ratios", "num_hash_layers", "qk_rope_head_dim",
    "compress_rope_theta", "partial_rotary_factor", "router_aux_loss_coef", "intermediate_size",
    "num_local_experts", "expert_dtype", *rope.FIELDS,
)  # fmt: skip
_KINDS: dict[str, Attention] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_BY_RATIO: dict[int, Attention] = {0: "window", 4: "csa", 128: "hca"}
_HASHED, _SCORED = "hash_moe", "moe"


def describes(model: DeepseekV4Config) -> bool:
    """Whether one of the architectures may be a model's: `written` refuses others."""
    return True


def tied(model: DeepseekV4Config) -> bool:
    """Whether the head is the transposed embedding."""
    return False


def ignores(name: str, model: DeepseekV4Config) -> bool:
    """Whether a tensor is of the layer that predicts a further token."""
    return name.startswith("mtp.")


def with_defaults(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json with transformers' defaults for absent fields.

    Raises `ValueError` where it names another architecture.
    """
    architecture(theirs, ARCHITECTURES)
    return {name: default for name, (default, _) in _FIELDS.items()} | theirs


def expected(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `[model]` that a config.json implies.

    Raises `ValueError`, with the end of a sentence that begins with the file, where it describes a
    model that this family does not support.
    """
    theirs = with_defaults(theirs)
    check_only(theirs, _ABSENT)
    check_quantised(theirs)
    check_known(theirs, {*_READ, *_SIZES, *_FIELDS, *_ABSENT})
    needed = sizes(theirs, _SIZES)
    own = {ours: theirs[name] for name, (_, ours) in _FIELDS.items()}
    layers = needed["n_layers"]
    return (
        needed | own | {"router_score": "sqrtsoftplus", "router_bias": True}
        | _attention(theirs, layers) | _hashed(theirs, layers) | _rotary(theirs)
    )  # fmt: skip


def _attention(theirs: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Attention of the layers: the fewest first ones after which the others repeat a cycle."""
    rates = theirs.get("compress_rates") or {}
    check_known(rates, _KINDS, " in its compress_rates")
    if types := theirs.get("layer_types"):
        kinds = [_KINDS.get(name) for name in types]
    elif ratios := theirs.get("compress_ratios"):
        kinds = [_BY_RATIO.get(ratio) for ratio in ratios]
    else:
        kinds = ["hca", "hca", *(("hca", "csa")[i % 2] for i in range(layers - 2))]
    kinds = kinds[:layers]
    if None in kinds or len(kinds) < layers:
        raise ValueError(
            f"has layer_types or compress_ratios of {len(kinds)} layers, or other kinds than "
            f"{', '.join(_KINDS)}: take another checkpoint."
        )
    first, cycle = split_pattern(kinds)
    return {
        "attention_first": first, "attention_cycle": cycle,
        "csa_rate": rates.get("compressed_sparse_attention", 4),
        "hca_rate": rates.get("heavily_compressed_attention", 128),
    }  # fmt: skip


def split_pattern(kinds: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shortest first entries and cycle that give a list.

    >>> split_pattern(["window", "window", "csa", "hca", "csa"])
    (('window', 'window'), ('csa', 'hca'))
    >>> split_pattern(["csa", "csa"])
    ((), ('csa',))
    """
    count = len(kinds)
    pairs = ((first, cycle) for first in range(count) for cycle in range(1, count - first + 1))
    first, cycle = min(
        (
            (first, cycle)
            for first, cycle in pairs
            if all(kinds[i] == kinds[first + (i - first) % cycle] for i in range(first, count))
        ),
        key=sum,
    )
    return tuple(kinds[:first]), tuple(kinds[first : first + cycle])


def _hashed(theirs: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Number of first layers whose experts a table chooses."""
    if not (types := theirs.get("mlp_layer_types")):
        return {"num_hash_layers": theirs.get("num_hash_layers", 3)}
    hashed = types[:layers].count(_HASHED)
    if types[:layers] != [_HASHED] * hashed + [_SCORED] * (layers - hashed):
        raise ValueError(
            f"has mlp_layer_types={types} but in this model only the first layers can be "
            f"{_HASHED!r}, and all others are {_SCORED!r}: take another checkpoint."
        )
    return {"num_hash_layers": hashed}


def _rotary(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields: of layers without entries the base alone, of the others all."""
    fields = rope.rope_fields(theirs)
    main, scaled = fields.get("main") or {}, fields.get("compress") or fields
    others = {
        name: value for name, value in theirs.items() if name not in ("rope_scaling", *rope.FIELDS)
    }
    found = rope.expected({**others, "rope_parameters": scaled})
    if main.get("rope_type", "default") != "default":
        raise ValueError(
            f"scales the rotary positions of layers without entries ({main}) but this model scales "
            f"only those of the others: take another checkpoint."
        )
    if "rope_attention_factor" in found:
        found["rope_attention_factor"] = found["rope_attention_factor"] or 1.0
    share = main.get("partial_rotary_factor", theirs.get("partial_rotary_factor")) or 64 / 512
    of_compressed = scaled.get("rope_theta") if main else None
    return found | {
        "rope_theta": main.get("rope_theta", theirs.get("rope_theta", 10000.0)),
        "compress_rope_theta": of_compressed or theirs.get("compress_rope_theta", 160000.0),
        "qk_rope_head_dim": theirs.get("qk_rope_head_dim") or int(theirs["head_dim"] * share),
    }


def trained(theirs: Mapping[str, Any], model: DeepseekV4Config) -> dict[str, Any]:
    """Empty: transformers computes no loss of the router."""
    return {}


def written(model: DeepseekV4Config, dtype: str, max_positions: int) -> dict[str, Any]:
    """The config.json of a model, in the fields of transformers 5.24.

    Raises `ValueError` with a sentence where it cannot express the model.
    """
    only = {"router_score": "sqrtsoftplus", "router_bias": True, "expert_groups": 1}
    check_expressible(model, {**only, "norm_topk_prob": True, "d_expert": model.d_ff}, MODELS)
    types = {ours: theirs for theirs, ours in _KINDS.items()}
    hashed = len(model.hashed_layers)
    share = {"partial_rotary_factor": model.qk_rope_head_dim / model.head_dim}
    scaling = rope.written(model, max_positions)["rope_scaling"] or {"rope_type": "default"}
    return {
        "architectures": list(ARCHITECTURES),
        "model_type": "deepseek_v4",
        **{theirs: getattr(model, ours) for theirs, ours in _SIZES.items()},
        **{theirs: getattr(model, ours) for theirs, (_, ours) in _FIELDS.items()},
        **{name: values[0] for name, values in _ABSENT.items() if name != "topk_method"},
        "layer_types": [types[model.attention_of(i)] for i in range(model.n_layers)],
        "compress_rates": {types["csa"]: model.csa_rate, types["hca"]: model.hca_rate},
        "mlp_layer_types": [_HASHED] * hashed + [_SCORED] * (model.n_layers - hashed),
        **share,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": model.rope_theta, **share},
            "compress": {**scaling, "rope_theta": model.compress_rope_theta, **share},
        },
        "max_position_embeddings": max_positions,
        "attention_dropout": 0.0,
        "num_nextn_predict_layers": 0,
        "bos_token_id": None,  # unknown; absent fields would mean those of DeepSeek
        "eos_token_id": None,
        "torch_dtype": dtype,
    }
