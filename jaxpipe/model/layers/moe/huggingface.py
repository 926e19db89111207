"""Names and config fields of experts at Hugging Face: those of Qwen3-MoE.

The fields are those of transformers' `Qwen3MoeConfig`, as version 4 (`num_experts`) and version 5
(`num_local_experts`) write them. A field that is absent has its default.
"""

from collections.abc import Mapping
from typing import Any

from jaxpipe.model.layers.moe.config import MixtureConfig
from jaxpipe.model.published import HuggingFaceTensor, check_choices, fused

LAYER = {
    "moe/router/gate": HuggingFaceTensor("mlp.gate.weight", transposed=True),
    "moe/experts/w_gate": HuggingFaceTensor("mlp.experts.{}.gate_proj.weight", transposed=True),
    "moe/experts/w_up": HuggingFaceTensor("mlp.experts.{}.up_proj.weight", transposed=True),
    "moe/experts/w_down": HuggingFaceTensor("mlp.experts.{}.down_proj.weight", transposed=True),
}
# The form that transformers 5 computes with, and saves with `save_original_format=False`: one
# tensor for all experts, [E, 2F, D] of gate and up, [E, D, F] of down.
FUSED = {
    **fused("mlp.experts.gate_up_proj", "moe/experts/w_gate", "moe/experts/w_up"),
    "moe/experts/w_down": HuggingFaceTensor("mlp.experts.down_proj", transposed=True),
}
# Names of DeepSeek-V3, and of models that route as it does: shared experts, biases on the choice,
# and fields of a config.json.
SHARED = {
    f"moe/shared/w_{name}": HuggingFaceTensor(
        f"mlp.shared_experts.{name}_proj.weight", transposed=True
    )
    for name in ("gate", "up", "down")
}
VARIABLES = {"router_bias": HuggingFaceTensor("mlp.gate.e_score_correction_bias")}
FIELDS = {
    "n_routed_experts": "n_experts",
    "n_shared_experts": "shared_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "d_expert",
    "first_k_dense_replace": "first_dense_layers",
    "routed_scaling_factor": "router_scale",
    "norm_topk_prob": "norm_topk_prob",
    "n_group": "expert_groups",
    "topk_group": "groups_per_token",
}
DEFAULTS: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
READ = "num_local_experts", "router_aux_loss_coef"
# Hugging Face's name: jaxpipe's name.
_CHOICES = {
    "num_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "d_expert",
    "norm_topk_prob": "norm_topk_prob",
    "decoder_sparse_step": "moe_every",
}
# Settings that Qwen3-MoE lacks, each with the value at which it has no effect.
ONLY_OURS = {
    "router_score": "softmax",
    "router_scale": 1.0,
    "expert_groups": 1,
    "shared_experts": 0,
}


def expected(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `[model]` fields that a config.json, with all defaults filled in, asks for.

    Raises `ValueError` if layers other than the first ones are dense, which `[model]` cannot
    express; its message continues a sentence that starts with the file.
    """
    dense = theirs["mlp_only_layers"] or []
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(
            f"has mlp_only_layers={dense} but of this model's layers only the first ones can be "
            f"left without experts: take another checkpoint."
        )
    number = theirs.get("num_local_experts", theirs["num_experts"])
    ours = {own: theirs[name] for name, own in _CHOICES.items()} | {"n_experts": number}
    return ours | {"first_dense_layers": len(dense)} | ONLY_OURS


def trained(theirs: Mapping[str, Any], model: MixtureConfig) -> dict[str, Any]:
    """Return `router_aux_loss` of `[model]` from a config.json; empty if it has none."""
    if not model.n_experts or (coefficient := theirs.get("router_aux_loss_coef")) is None:
        return {}
    return {"router_aux_loss": coefficient * _aux_loss_per_coefficient(model.resolved())}


def _aux_loss_per_coefficient(model: MixtureConfig) -> float:
    """`model.router_aux_loss` that has the gradient of a `router_aux_loss_coef` of 1.

    transformers takes the shares of choices and of scores over the tokens of all S sparse layers
    together, counts each of a token's K choices as 1 rather than 1 / K, and has one loss, which is
    K where loads are even. The loss here is 1 there, in each of S layers.
    """
    return model.experts_per_token / sum(layer < model.n_layers for layer in model.sparse_layers)


def written(
    model: MixtureConfig, only: Mapping[str, Any] = ONLY_OURS, theirs: str = "Qwen3-MoE"
) -> dict[str, Any]:
    """Return the fields of a config.json that describe a model's experts.

    Raises `ValueError` with a sentence if `theirs` cannot express them, which have only the values
    in `only`.
    """
    check_expressible(model, only, theirs)
    resolved = model.resolved()
    return {
        **{name: getattr(resolved, own) for name, own in _CHOICES.items()},
        "mlp_only_layers": list(range(model.first_dense_layers)),
        **written_loss(model),
    }


def written_loss(model: MixtureConfig) -> dict[str, Any]:
    """Return the fields of a config.json for the router's loss, which transformers leaves out."""
    return {
        "router_aux_loss_coef": model.router_aux_loss / _aux_loss_per_coefficient(model),
        "output_router_logits": False,
    }


def check_expressible(model: MixtureConfig, only: Mapping[str, Any], theirs: str) -> None:
    """Raise `ValueError` with a sentence where experts have other values than those in `only`."""
    unbiased = {} if only.get("router_bias") else {"router_bias": False, "router_bias_rate": 0.0}
    check_choices(model.resolved(), {**only, **unbiased}, f"the experts of {theirs}")


def shared_count(theirs: Mapping[str, Any], shared: str, expert: str) -> int:
    """How many experts are as wide as the shared one, by a config.json's fields of both widths.

    Raises `ValueError` where that is no integer.
    """
    width, each = theirs[shared], theirs[expert]
    if width % each:
        raise ValueError(
            f"has {shared}={width}, which is no multiple of {expert}={each}, as in this model: "
            f"take another checkpoint."
        )
    return width // each
