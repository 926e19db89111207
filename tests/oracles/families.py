"""FLOPs of the layers of further families: latent attention, its predictions, and gpt-oss.

Everything is for one microbatch on one device, with rows too short for two blocks of queries.
"""

from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.families.gpt_oss.config import GptOssConfig
from oracles.decoder import head_flops
from oracles.flops import OpFlops
from oracles.mixture import expert_rows, sparse_layer_flops


def latent_layer_flops(model: DeepseekConfig, *, batch: int, seq_len: int) -> OpFlops:
    """Return the matmul FLOPs of latent attention and an MLP (DeepSeek-AI 2024, section 2.1)."""
    tokens, d, heads, latent = batch * seq_len, model.d_model, model.n_heads, model.kv_lora_rank
    key, value = model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
    queries = model.q_lora_rank * (d + heads * key)
    keys = d * (latent + model.qk_rope_head_dim)
    keys += latent * heads * (model.qk_nope_head_dim + value)
    matrices = queries + keys + heads * value * d + 3 * d * model.d_ff
    pairs = tokens * seq_len * heads
    products = OpFlops.of_weight(2.0 * tokens * matrices)
    return products + OpFlops.of_values(2.0 * pairs * (key + value))


def prediction_flops(model: DeepseekConfig, *, batch: int, seq_len: int) -> OpFlops:
    """Return the FLOPs of one further token: a merge, a block, and the head once more."""
    sizes = {"batch": batch, "seq_len": seq_len}
    merge = OpFlops.of_weight(2.0 * batch * seq_len * 2 * model.d_model**2)
    return merge + latent_layer_flops(model, **sizes) + head_flops(model, **sizes)


def gpt_oss_layer_flops(model: GptOssConfig, *, batch: int, seq_len: int) -> OpFlops:
    """Return the FLOPs of a layer: sinks multiply nothing; biases of experts are one-hot products.

    A row's biases are the product of its expert's one-hot vector with all biases.
    """
    rows = expert_rows(model, batch=batch, seq_len=seq_len)
    biases = 2.0 * rows * model.n_experts * (2 * model.expert_width + model.d_model)
    layer = sparse_layer_flops(model, batch=batch, seq_len=seq_len)
    return layer + OpFlops(F=biases, W=biases)
