"""The experts of a small Qwen3-MoE in Hugging Face's format, with NumPy alone."""

import numpy as np

from jaxpipe.model.families.llama.config import LlamaConfig

# Every second layer is sparse except among the first two: only the last one is.
QWEN3_MOE = LlamaConfig(
    n_layers=4, d_model=32, n_heads=4, n_kv_heads=2, head_dim=10, d_ff=48, vocab_size=64,
    rope_theta=1e6, norm_eps=1e-6, qk_norm=True, n_experts=6, experts_per_token=2, d_expert=20,
    moe_every=2, first_dense_layers=2,
)  # fmt: skip
# Expert matrices are square, as many as d_model, and routing weights do not add up to 1.
SQUARE_MOE = LlamaConfig(
    n_layers=1, d_model=8, n_heads=2, n_kv_heads=2, head_dim=4, d_ff=8, vocab_size=32, qk_norm=True,
    n_experts=8, experts_per_token=3, norm_topk_prob=False,
)  # fmt: skip


def config_fields(model):
    """Return the config.json fields of the experts, as transformers writes them."""
    return {
        "decoder_sparse_step": model.moe_every,
        "mlp_only_layers": list(range(model.first_dense_layers)),
        "moe_intermediate_size": model.expert_width,
        "norm_topk_prob": model.norm_topk_prob,
        "num_experts": model.n_experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": 0.001,
    }


def shapes(model):
    """Return the shapes of a sparse layer's MLP, by name; matrices are `[out, in]`."""
    d, f = model.d_model, model.expert_width
    found = {"mlp.gate": (model.n_experts, d)}
    for e in range(model.n_experts):
        found |= {
            f"mlp.experts.{e}.gate_proj": (f, d),
            f"mlp.experts.{e}.up_proj": (f, d),
            f"mlp.experts.{e}.down_proj": (d, f),
        }
    return found


def mixture(model, linear, h_BLD):
    """Compute a sparse layer's MLP, token by token, after transformers' modeling_qwen3_moe.py."""
    logits = linear(h_BLD, "mlp.gate")
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    made = np.zeros_like(h_BLD)
    for place in np.ndindex(h_BLD.shape[:2]):
        chosen = np.argsort(-scores[place])[: model.experts_per_token]
        weights = scores[place][chosen]
        if model.norm_topk_prob:
            weights = weights / weights.sum()
        for expert, weight in zip(chosen, weights):
            gate, up = (
                linear(h_BLD[place], f"mlp.experts.{expert}.{name}_proj") for name in ("gate", "up")
            )
            down = f"mlp.experts.{expert}.down_proj"
            made[place] += weight * linear(gate / (1 + np.exp(-gate)) * up, down)
    return made
