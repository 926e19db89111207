"""The smallest model with the same choices as a given one. Importing this imports no jax."""

import math
from typing import Any

from msgspec.structs import replace

from jaxpipe.config import ParallelConfig
from jaxpipe.lab.verification.smaller_loops import SmallerLoops
from jaxpipe.model import ModelConfig
from jaxpipe.model.layers.moe.config import is_sparse

_HEAD, _HIDDEN = 8, 12  # widths of a head, and per device of an MLP
_WIDTHS = {  # of DeepSeek's attention and of look-ups, in which all differ
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "o_lora_rank": 10, "index_n_heads": 8, "index_head_dim": 7, "csa_rate": 2,
    "hca_rate": 4, "ngram_rows": 13, "ngram_width": 3,
}  # fmt: skip
_RECURRENT = {  # of delta networks, and of Mamba-2
    "delta_key_dim": 6, "delta_value_dim": 5, "delta_head_dim": 6, "delta_taps": 4,
    "delta_chunk": 2, "mamba_head_dim": 5, "mamba_state": 6, "mamba_taps": 4, "mamba_chunk": 3,
}  # fmt: skip


def smaller_model(
    model: ModelConfig, before: ParallelConfig, after: ParallelConfig, loops: SmallerLoops,
    *, layers: int, length: int,
) -> ModelConfig:  # fmt: skip
    """Return a small model that keeps the family, every choice, and what divides what.

    Key/value heads stay shared by query heads, or copied on devices, where they were; a vocabulary
    that its devices do not divide stays one; groups of experts, shared experts, leading dense
    layers, a sliding window, chunks, chosen keys, look-ups and predictions of further tokens stay.

    Args:
      model: the model of the run.
      before, after: the mesh of the run, and the one of the smaller run.
      loops: the loops over layers that it keeps, for which a pattern of kinds stays long enough.
      layers: layers that stages are made of, in the smaller run.
      length: tokens of a sequence in the smaller run.
    """
    heads, keys = _head_counts(model, before, after)
    equal = model.n_heads * model.head_size == model.d_model
    depth, every = min(model.tokens_ahead, 2), loops.most + 1
    alone, group = getattr(model, "index_first", 0), getattr(model, "index_group", 1)
    groups = max(layers - (depth > 0) - alone, 1)
    sizes = {
        "n_heads": heads,
        "n_kv_heads": keys,
        "head_dim": _HEAD if model.head_dim and not hasattr(model, "qk_nope_head_dim") else 0,
        "o_groups": after.tp,
        "d_model": heads * (_HEAD if equal else _HEAD // 2),
        "d_ff": _HIDDEN * after.tp,
        "vocab_size": _vocabulary(model.vocab_size, before, after),
        "mtp_depth": depth,
        "n_layers": alone + groups * group,
        "max_seq_len": length if model.max_seq_len else 0,
        "global_every": min(getattr(model, "global_every", 0), every),
        "sliding_window": min(getattr(model, "sliding_window", 0), length // 2 - 1),
        "attention_chunk": min(getattr(model, "attention_chunk", 0), length // 2 - 1),
        "index_topk": min(getattr(model, "index_topk", 0), length // 2 - 1),
        "nope_every": min(getattr(model, "nope_every", 0), every),
        "attention_every": min(getattr(model, "attention_every", 0), every),
        "ngram_layers": tuple(i for i in getattr(model, "ngram_layers", ()) if i < layers),
        "ngram_heads": 2 * after.tp,
        "temperature_floor": min(getattr(model, "temperature_floor", 0), 2),
        "preset": "",
    }
    rotated = _WIDTHS["qk_rope_head_dim"] if hasattr(model, "qk_rope_head_dim") else _HEAD
    for name in ("rope_short_factors", "rope_long_factors"):
        sizes[name] = getattr(model, name, ())[: rotated // 2]
    widths = _WIDTHS | _RECURRENT
    sizes |= {name: min(getattr(model, name, 0), width) for name, width in widths.items()}
    sizes |= _recurrent_heads(model, after)
    if hasattr(model, "layer_pattern"):
        letters = dict(zip(model.resolved().layer_pattern, model.layer_kinds))
        of_kinds = (letter * loops.layers.get(kind, 1) for letter, kind in letters.items())
        sizes["layer_pattern"] = "".join(of_kinds)
    sizes |= _experts(model, after, loops) if model.routed_experts else {}
    return replace(model, **{k: v for k, v in sizes.items() if k in model.__struct_fields__})


def least_layers(
    model: ModelConfig, before: ParallelConfig, after: ParallelConfig, loops: SmallerLoops
) -> int:
    """Return the fewest layers with which every kind of layer is there."""
    kinds, most = set(model.layer_kinds), min(model.pipeline_layers, 8 * loops.most)
    for layers in range(1, most):
        smaller = smaller_model(model, before, after, loops, layers=layers, length=16)
        if smaller.pipeline_layers == layers and set(smaller.layer_kinds) == kinds:
            return layers
    return most


def _recurrent_heads(model: ModelConfig, after: ParallelConfig) -> dict[str, int]:
    """Numbers of heads of delta networks and of Mamba-2, by settings of which a model has some."""
    # In arrays of two values XLA on CPU computes Adam's powers, of float32, otherwise.
    groups = 4 * after.tp * after.cp
    sizes = {"delta_heads": groups}
    of_delta, of_mamba = ("delta_key_heads", "delta_value_heads"), ("mamba_groups", "mamba_heads")
    for of_group, of_head in of_delta, of_mamba:
        if hasattr(model, of_group):
            shared = min(getattr(model, of_head) // getattr(model, of_group), 2)
            sizes |= {of_group: groups, of_head: groups * shared}
    return sizes


def _head_counts(
    model: ModelConfig, before: ParallelConfig, after: ParallelConfig
) -> tuple[int, int]:
    """Numbers of query heads and of key/value heads."""
    keys, copies = max(model.key_heads // before.tp, 1), max(before.tp // model.key_heads, 1)
    exchanging = after.exchanging
    if before.exchanging:  # key/value heads are exchanged like query heads, or copied
        keys = exchanging if keys % before.exchanging == 0 else 1
    keys = min(keys, max(exchanging, 2))
    heads = math.lcm(keys * min(model.n_heads // model.key_heads, 2), max(exchanging, 1))
    if copies > 1:
        return heads * after.tp, max(after.tp // copies, 1)
    return heads * after.tp, keys * after.tp


def _vocabulary(size: int, before: ParallelConfig, after: ParallelConfig) -> int:
    """Number of tokens, which the devices divide where those of the run divide the run's."""
    shards = after.tp * max(after.vocab_shared_by, 1)
    uneven = size % (before.tp * max(before.vocab_shared_by, 1)) > 0
    return -(-40 // shards) * shards + uneven


def _experts(model: ModelConfig, after: ParallelConfig, loops: SmallerLoops) -> dict[str, Any]:
    """Sizes of a mixture of experts."""
    grouped = getattr(model, "index_group", 1) > 1  # where blocks of a group may be dense
    dense = max((least for kind, least in loops.layers.items() if not is_sparse(kind)), default=1)
    groups = min(model.expert_groups, 4)
    chosen = min(model.groups_per_token, max(groups // 2, 1)) if groups > 1 else 1
    unit = math.lcm(after.ep, groups)
    each = min(model.experts_per_token, 2)
    experts = unit * max(2, -(-2 * each // unit))
    return {
        "n_experts": experts,
        "experts_per_token": each,
        "expert_groups": groups,
        "groups_per_token": chosen,
        "group_score_experts": min(model.group_score_experts, experts // groups),
        "d_expert": _HIDDEN // 2 * after.tp if model.d_expert else 0,
        "shared_experts": min(model.shared_experts, 1),
        "first_dense_layers": min(model.first_dense_layers, model.n_layers if grouped else dense),
        "moe_every": min(model.moe_every, loops.most + 1),
    }
