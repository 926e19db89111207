"""A small GPT-2 in Hugging Face's format, initialized and computed with NumPy alone."""

import numpy as np

from jaxpipe.model.families.gpt2.config import GPT2Config

GPT2 = GPT2Config(n_layers=2, d_model=32, n_heads=4, d_ff=48, vocab_size=64, max_seq_len=64)


def config_json(model):
    """Return the config.json that transformers writes for this model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": model.norm_eps,
        "n_embd": model.d_model,
        "n_head": model.n_heads,
        "n_inner": model.d_ff,
        "n_layer": model.n_layers,
        "n_positions": model.max_seq_len,
        "scale_attn_weights": True,
        "torch_dtype": "float32",
        "vocab_size": model.vocab_size,
    }


def shapes(model):
    """Return the shape of every tensor by its Hugging Face name; matrices are `[in, out]`."""
    d, f = model.d_model, model.d_ff
    found = {
        "transformer.wte.weight": (model.vocab_size, d),
        "transformer.wpe.weight": (model.max_seq_len, d),
        "transformer.ln_f.weight": (d,),
        "transformer.ln_f.bias": (d,),
    }
    for i in range(model.n_layers):
        layer = {
            "ln_1.weight": (d,),
            "ln_1.bias": (d,),
            "attn.c_attn.weight": (d, 3 * d),
            "attn.c_attn.bias": (3 * d,),
            "attn.c_proj.weight": (d, d),
            "attn.c_proj.bias": (d,),
            "ln_2.weight": (d,),
            "ln_2.bias": (d,),
            "mlp.c_fc.weight": (d, f),
            "mlp.c_fc.bias": (f,),
            "mlp.c_proj.weight": (f, d),
            "mlp.c_proj.bias": (d,),
        }
        found |= {f"transformer.h.{i}.{name}": shape for name, shape in layer.items()}
    return found


def reference_logits(model, tensors, tokens_BL):
    """Return `[B, L, V]` in float64, after transformers' modeling_gpt2.py."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    batch, length = tokens_BL.shape

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_eps)
        return x * weights[f"transformer.{name}.weight"] + weights[f"transformer.{name}.bias"]

    def conv1d(x, name):
        return x @ weights[f"transformer.{name}.weight"] + weights[f"transformer.{name}.bias"]

    x = weights["transformer.wte.weight"][tokens_BL]
    x = x + weights["transformer.wpe.weight"][None, :length]
    for i in range(model.n_layers):
        made = conv1d(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        made = made.reshape(batch, length, 3, model.n_heads, -1).transpose(2, 0, 3, 1, 4)
        queries, keys, values = made
        scores = queries @ keys.transpose(0, 1, 3, 2) / np.sqrt(values.shape[-1])
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = scores / scores.sum(-1, keepdims=True) @ values
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, length, -1)
        x = x + conv1d(mixed, f"h.{i}.attn.c_proj")
        up = conv1d(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = x + conv1d(gelu, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ weights["transformer.wte.weight"].T
