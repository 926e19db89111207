"""Small models in Hugging Face's format, computed with NumPy alone; helpers to import them."""

import json

import hf_gpt2
import hf_moe
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from hf_gpt2 import GPT2
from hf_moe import QWEN3_MOE, SQUARE_MOE
from safetensors.numpy import load_file, save_file

from jaxpipe.checkpoint.hf.parameters import export_huggingface, import_huggingface
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.core.contract import Context
from jaxpipe.model import FAMILIES
from jaxpipe.model.families.llama.config import LlamaConfig

LLAMA = LlamaConfig(
    n_layers=3, d_model=32, n_heads=4, n_kv_heads=2, d_ff=48, vocab_size=64, rope_theta=10000.0
)
# The query heads together are wider than d_model, as in Qwen3-0.6B; half a head is odd.
QWEN3 = LlamaConfig(
    n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, head_dim=10, d_ff=48, vocab_size=64,
    rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tie_embeddings=True,
)  # fmt: skip
# All matrices are square: a missing transpose shows in the numbers alone.
SQUARE = LlamaConfig(n_layers=2, d_model=32, n_heads=4, n_kv_heads=4, d_ff=32, vocab_size=32)
# Llama 3.1's scaled rotary positions, in a context so short that every case occurs.
LLAMA31 = msgspec.structs.replace(
    LLAMA, head_dim=16, rope_factor=8.0, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0,
    rope_original_positions=256,
)  # fmt: skip
MISTRAL = msgspec.structs.replace(LLAMA, sliding_window=4)
MODELS = {
    "llama": LLAMA, "llama31": LLAMA31, "qwen3": QWEN3, "square": SQUARE, "mistral": MISTRAL,
    "gpt2": GPT2, "qwen3_moe": QWEN3_MOE, "square_moe": SQUARE_MOE,
}  # fmt: skip


def config_json(model):
    """Return the config.json that transformers 4 writes for this model."""
    if model.family == "gpt2":
        return hf_gpt2.config_json(model)
    name = "Qwen3" if model.qk_norm else "Mistral" if model.sliding_window else "Llama"
    own = {"sliding_window": model.sliding_window} if model.sliding_window else {}
    if model.n_experts:
        name, own = "Qwen3Moe", hf_moe.config_fields(model)
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": "qwen3_moe" if model.n_experts else name.lower(),
        **own,
        "attention_bias": False,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_attention_heads": model.n_heads,
        "num_hidden_layers": model.n_layers,
        "num_key_value_heads": model.n_kv_heads,
        "rms_norm_eps": model.norm_eps,
        "rope_scaling": rope_scaling(model),
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": "float32",
        "vocab_size": model.vocab_size,
    }


def rope_scaling(model):
    """Return Llama 3.1's rope_scaling, or None."""
    return (
        None
        if model.rope_factor == 1
        else {
            "rope_type": "llama3",
            "factor": model.rope_factor,
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_positions,
        }
    )


def rope_scaling_of(model, inverse):
    """Scale frequencies by wavelength, case by case, as in Llama 3.1's own code."""
    if model.rope_factor == 1:
        return inverse
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    old = model.rope_original_positions
    found = []
    for frequency in inverse:
        wavelength = 2 * np.pi / frequency
        if wavelength < old / high:
            found.append(frequency)
        elif wavelength > old / low:
            found.append(frequency / model.rope_factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            found.append((1 - smooth) * frequency / model.rope_factor + smooth * frequency)
    return np.array(found)


def random_tensors(model, dtype=np.float32, seed=0):
    """Return every tensor of this model by its Hugging Face name."""
    rng = np.random.default_rng(seed)
    shapes_of = hf_gpt2.shapes if model.family == "gpt2" else shapes
    return {
        name: (rng.standard_normal(shape) * 0.2 + (len(shape) == 1)).astype(dtype)
        for name, shape in shapes_of(model).items()
    }


def shapes(model):
    """Return the shape of every tensor by its Hugging Face name; matrices are `[out, in]`."""
    d, f, v, k = model.d_model, model.d_ff, model.vocab_size, model.head_size
    q, kv = model.n_heads * k, model.n_kv_heads * k
    found = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not model.tie_embeddings:
        found["lm_head.weight"] = (v, d)
    for i in range(model.n_layers):
        layer = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "post_attention_layernorm": (d,),
        }
        dense = {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
        layer |= hf_moe.shapes(model) if i in model.sparse_layers else dense
        if model.qk_norm:
            layer |= {"self_attn.q_norm": (k,), "self_attn.k_norm": (k,)}
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found


def write_model(directory, model, tensors, *, shards=1, **changes):
    """Write an HF directory; `changes` apply to config.json (... removes a field)."""
    directory.mkdir(parents=True)
    fields = config_json(model) | changes
    fields = {name: value for name, value in fields.items() if name not in changes or value != ...}
    (directory / "config.json").write_text(json.dumps(fields))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def imported(directory, model, tensors):
    """Return the step directory of a model that was written and imported."""
    source = write_model(directory / "hf", model, tensors)
    return import_huggingface(source, model, directory / "c", {})


def export(step, model, target, **options):
    options = {"dtype": "float32", "max_positions": 64, "max_shard_bytes": 10**9} | options
    options.setdefault("serving", ServingFiles())
    export_huggingface(StoredCheckpoint(step), model, target, **options)
    return target


def all_tensors(directory):
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same_bytes(found, expected):
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tobytes() == tensor.tobytes(), name


def reference_logits(model, tensors, tokens_BL):
    """Return `[B, L, V]` in float64, after transformers' modeling_llama.py and similar models."""
    if model.family == "gpt2":
        return hf_gpt2.reference_logits(model, tensors, tokens_BL)
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, groups, k = model.n_heads, model.n_kv_heads, model.head_size
    batch, length = tokens_BL.shape

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_eps) * weights[name]

    inverse = rope_scaling_of(model, 1.0 / model.rope_theta ** (np.arange(0, k, 2) / k))
    angles = np.arange(length)[:, None] * inverse[None]
    angles = np.concatenate([angles, angles], axis=-1)

    def rotated(x):  # [B, H, L, K]
        turned = np.concatenate([-x[..., k // 2 :], x[..., : k // 2]], axis=-1)
        return x * np.cos(angles) + turned * np.sin(angles)

    x = weights["model.embed_tokens.weight"][tokens_BL]
    for i in range(model.n_layers):

        def linear(x, name, i=i):
            return x @ weights[f"model.layers.{i}.{name}.weight"].T

        def split(x, name, i=i):
            x = linear(x, name).reshape(batch, length, -1, k)
            gain = f"model.layers.{i}.{name.replace('proj', 'norm')}.weight"
            return (norm(x, gain) if gain in weights else x).transpose(0, 2, 1, 3)

        h = norm(x, f"model.layers.{i}.input_layernorm.weight")
        queries = rotated(split(h, "self_attn.q_proj"))
        keys = np.repeat(rotated(split(h, "self_attn.k_proj")), heads // groups, axis=1)
        values = np.repeat(split(h, "self_attn.v_proj"), heads // groups, axis=1)
        scores = queries @ keys.transpose(0, 1, 3, 2) / np.sqrt(k)
        seen = np.tri(length, dtype=bool)
        if model.sliding_window:
            seen &= ~np.tri(length, k=-model.sliding_window, dtype=bool)
        scores = np.where(seen, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = scores / scores.sum(-1, keepdims=True) @ values
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, length, -1)
        x = x + linear(mixed, "self_attn.o_proj")
        h = norm(x, f"model.layers.{i}.post_attention_layernorm.weight")
        if i in model.sparse_layers:
            x = x + hf_moe.mixture(model, linear, h)
            continue
        gate = linear(h, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, "model.norm.weight") @ head.T


def stored_params(step_directory):
    """Return the tree `{"layers": ..., "embed_head": ...}` of a checkpoint."""
    checkpoint = StoredCheckpoint(step_directory)
    paths = [path for path in checkpoint.leaves if path[0] == "params"]
    return unflatten_dict(dict(zip(paths, checkpoint.read(paths))))["params"]


def stored_variables(step_directory):
    """Return the state of a checkpoint that is no parameter, by name."""
    checkpoint = StoredCheckpoint(step_directory)
    paths = [path for path in checkpoint.leaves if path[0] == "variables"]
    return {path[1]: array for path, array in zip(paths, checkpoint.read(paths) if paths else [])}


def our_logits(model, params, tokens_BL, variables=None):
    """Return `[B, L, V]` by jaxpipe's decoder."""
    decoder = FAMILIES[model.family].build(model)
    microbatch = {"inputs": jnp.asarray(tokens_BL)}
    x = decoder.embed(params["embed_head"], microbatch)
    for i in range(model.pipeline_layers):
        context, kind = Context(microbatch, jnp.int32(i), None, variables), model.layer_kinds[i]
        x = decoder.layer(params["layers"][str(i)], x, context, kind).y
    x, head = nnx.merge(decoder._embed_head_graph, params["embed_head"]).leave(x)
    return np.asarray(x @ head)
