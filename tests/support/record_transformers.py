"""Loss, gradients and updates of tiny models of transformers, written to `tests/data/outside`.

    pip install torch transformers numpy
    python tests/support/record_transformers.py

Nothing of jaxpipe is imported. Each `NAME.npz` has `config` (config.json's text), `tokens`
`[STEPS, M, B, L + 1]`, `ignored` (which targets do not count), and all parameters concatenated in
the order of `shapes` (JSON, by Hugging Face's names): the initial `weights` (float32), their
`gradients` in the first step (float64), and the parameters after STEPS updates by `adamw` and
`muon` (float32), with the losses of these steps, `adamw_losses` and `muon_losses`.
"""

import argparse
import json
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import safetensors.torch  # noqa: F401 - its tables of dtypes are made here, not in `float64`
import torch
import transformers
from transformers_models import MODELS, RELATIVES, VOCABULARY
from updates import STEPS, updated

OUT = Path(__file__).parents[1] / "data" / "outside"
MICROBATCHES, BATCH, LENGTH = 4, 4, 8
IGNORE = -100


@contextmanager
def float64():
    """Make transformers compute in float64 also where its code asks for float32.

    Its norms, softmaxes, rotary angles and loss ask for float32 whatever the parameters' dtype is.
    """
    kept = {name: getattr(torch, name) for name in ("float32", "float")}
    single = torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = single
        for name, value in kept.items():
            setattr(torch, name, value)
        torch.set_default_dtype(kept["float32"])


def build(name):
    """Return a transformers model in the default dtype."""
    family, settings = (MODELS | RELATIVES)[name]
    text = "Text" if family in ("Gemma3", "Llama4", "Qwen3_5", "Qwen3_5Moe") else ""
    config = getattr(transformers, f"{family}{text}Config")(**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    model = model(config).to(torch.get_default_dtype()).eval()
    for layer, tokens in enumerate(n for n, _ in model.named_buffers() if n.endswith("tid2eid")):
        table, order = (
            model.get_buffer(tokens),
            np.random.default_rng(layer).permutation(VOCABULARY),
        )
        each = np.arange(table.shape[1])
        table.copy_(torch.from_numpy((order[:, None] * len(each) + each) % config.n_routed_experts))
    return model


# Of a family whose files have experts as separate tensors: where they are, and their names.
_EXPERT_NAMES = {
    **dict.fromkeys(
        (
            "qwen3_moe",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "ernie4_5_moe",
            "glm4_moe",
            "glm_moe_dsa",
            "qwen3_next",
            "qwen3_5_moe_text",
        ),
        ("mlp", ("gate_proj", "up_proj", "down_proj")),
    ),
    **dict.fromkeys(
        ("mixtral", "minimax_m2", "kimi_linear"), ("block_sparse_moe", ("w1", "w3", "w2"))
    ),
    "deepseek_v4": ("ffn", ("w1", "w3", "w2")),
    "nemotron_h": ("mlp", (None, "up_proj", "down_proj")),
}
# Names of DeepSeek-V4's own files, of which transformers renames these parts.
_DEEPSEEK_V4 = (
    ("lm_head", "head"), ("attn_hc.", "hc_attn_"), ("ffn_hc.", "hc_ffn_"),
    ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
    ("self_attn", "attn"),
    ("compressor.indexer.scorer", "indexer"), ("compressor.indexer.q_b_proj", "indexer.wq_b"),
    ("compressor.indexer", "indexer.compressor"), (".attn.kv_norm", ".attn.own_norm"),
    ("kv_norm", "norm"), ("own_norm", "kv_norm"), ("position_bias", "ape"), ("sinks", "attn_sink"),
    ("q_a_proj", "wq_a"), ("q_b_proj", "wq_b"), ("kv_proj", "wkv"), ("o_a_proj", "wo_a"),
    ("o_b_proj", "wo_b"), ("q_a_norm", "q_norm"), ("shared_experts.gate_proj", "shared_experts.w1"),
    ("gate_proj.weight", "wgate.weight"), ("shared_experts.up_proj", "shared_experts.w3"),
    ("shared_experts.down_proj", "shared_experts.w2"),
)  # fmt: skip
_KIMI_LINEAR = (
    ("forget_gate.", ""),
    *((f"block_sparse_moe.{one}_proj", f"mlp.{one}_proj") for one in ("gate", "up", "down")),
)
_RENAMED = {
    "deepseek_v4": _DEEPSEEK_V4, "kimi_linear": _KIMI_LINEAR,
    "nemotron_h": (("model.", "backbone."),),
    "granitemoehybrid": (
        ("experts.gate_up_proj", "input_linear.weight"),
        ("experts.down_proj", "output_linear.weight"), ("router.weight", "router.layer.weight"),
    ),
}  # fmt: skip


def _own_name(name, family):
    """Return a tensor's name in the files of a family whose parts transformers renames."""
    for theirs, own in _RENAMED.get(family, ()):
        name = name.replace(theirs, own)
    return name


def published(tensors, family):
    """Return a model's tensors by their names in its files, where experts have separate tensors."""
    mlp, (gate, up, down) = _EXPERT_NAMES.get(family, ("mlp", (None,) * 3))
    found = {}
    for name, tensor in tensors.items():
        place, fused, kind = name.replace(".mlp.", f".{mlp}.").partition(".experts.")
        if _has_convolutions(place, family):
            names = (place.replace("conv1d", f"{one}_conv1d") for one in "qkv")
            found |= dict(zip(names, np.split(tensor, 3)))
            continue
        names = {"gate_up_proj": (gate, up), "up_proj": (up,), "down_proj": (down,)}.get(kind)
        separate = down and names
        for e, every in enumerate(tensor if separate else ()):
            for part, array in zip(names, np.split(every, len(names))):
                found[_own_name(f"{place}{fused}{e}.{part}.weight", family)] = array
        if not separate:
            found[_own_name(place + fused + kind, family)] = tensor
    return found


def _has_convolutions(name, family):
    """Whether a tensor has the convolutions of queries, keys and values, which files separate."""
    return family == "kimi_linear" and name.endswith(".conv1d.weight")


def of_model(named, params, family):
    """Invert `published`, for the parameters that a model has."""
    shapes = {name: np.zeros(tensor.shape) for name, tensor in named.items()}
    for name in named:
        found = published({name: shapes[name]}, family)
        parts = [params[part] for part in found]
        if _has_convolutions(name, family):
            parts = [np.concatenate(parts)]
        if len(parts) > 1:  # gate and up of each expert, or down of each
            both = len(parts) // len(shapes[name])
            experts = (parts[i : i + both] for i in range(0, len(parts), both))
            parts = [np.stack([np.concatenate(each) for each in experts])]
        shapes[name] = parts[0]
    return shapes


def drawn(name, shape, offset=0.0):
    """Return random float32 values by name: gains, stored without an offset, near 1; biases near 0.

    So gradients in float32 are close to those in float64 in every family.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    vector = len(shape) == 1
    gain = vector and not name.endswith("bias")
    return (rng.standard_normal(shape) * (0.1 if vector else 0.3) + gain * (1 - offset)).astype(
        np.float32
    )


def batches():
    """Return tokens of STEPS steps, and their ignored targets, one full microbatch among them."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (STEPS, MICROBATCHES, BATCH, LENGTH + 1), dtype=np.int32)
    ignored = rng.random((STEPS, MICROBATCHES, BATCH, LENGTH)) < 0.2
    ignored[:, 1] = True
    return tokens, ignored


def learned(model):
    """Return the parameters by name without those that a router balances by, which stay 0."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def loss_and_gradients(model, params, tokens, ignored):
    """Return the mean loss of a step `[M, B, L + 1]`, and the gradients by published names."""
    named = learned(model)
    with torch.no_grad():
        for name, value in of_model(named, params, model.config.model_type).items():
            named[name].copy_(torch.from_numpy(value))
    model.zero_grad()
    rows = torch.from_numpy(tokens.reshape(-1, tokens.shape[-1]).astype(np.int64))
    hidden = torch.from_numpy(ignored.reshape(-1, ignored.shape[-1]))
    targets = torch.where(hidden, IGNORE, rows[:, 1:])
    logits = model(rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE
    )
    loss.backward()
    found = {  # a frozen parameter has none
        name: np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy()
        for name, tensor in named.items()
    }
    gradients = published(found, model.config.model_type)
    return loss.item(), {name: gradient.copy() for name, gradient in gradients.items()}


def first_step(name):
    """Return the loss of a model's first step, and all arrays of a record but those of updates."""
    build(name)  # modules imported here must not see float32 replaced
    with float64():
        _, _, loss, found = _first_step(name)
    return loss, found


def _first_step(name):
    tokens, ignored = batches()
    model = build(name)
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [type(model).__name__]
    shapes = {
        name: array.shape
        for name, array in published(
            {name: tensor.detach().numpy() for name, tensor in learned(model).items()},
            model.config.model_type,
        ).items()
    }
    offset = 1.0 if name == "gemma3" else 0.0
    first = {own: drawn(own, shape, offset) for own, shape in shapes.items()}
    wide = {name: array.astype(np.float64) for name, array in first.items()}
    loss, gradients = loss_and_gradients(model, wide, tokens[0], ignored[0])
    found = {
        "config": np.array(json.dumps(config)), "shapes": np.array(json.dumps(shapes)),
        "tokens": tokens, "ignored": ignored, "weights": end_to_end(first),
        "gradients": end_to_end(gradients),
    }  # fmt: skip
    return model, wide, loss, found


def recorded(name):
    """Return all arrays of a model's record, by their names in the file."""
    build(name)  # modules imported here must not see float32 replaced
    with float64():
        model, wide, _, found = _first_step(name)
        tokens, ignored = found["tokens"], found["ignored"]
        # Muon's update of a matrix is not that of a tensor with all experts, gates beside ups.
        for optimizer in ("adamw",) if name in ("gpt_oss", "llama4") else ("adamw", "muon"):
            params, state, losses = wide, {}, []
            for step in range(STEPS):
                loss, gradients = loss_and_gradients(model, params, tokens[step], ignored[step])
                losses.append(loss)
                params = updated(optimizer, state, params, gradients, step + 1)
            found[optimizer] = end_to_end(params).astype(np.float32)
            found[f"{optimizer}_losses"] = np.array(losses)
    return found


def end_to_end(arrays):
    """Concatenate arrays into one vector."""
    return np.concatenate([array.ravel() for array in arrays.values()])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.models:
        np.savez_compressed(arguments.out / f"{name}.npz", **recorded(name))


if __name__ == "__main__":
    main()
