"""Predictions of a further token equal those of transformers' `MtpModel`, in float64."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import record_transformers as record  # noqa: E402
import transformers_records as records  # noqa: E402
from hf_models import all_tensors, assert_same_bytes  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from transformers.modeling_layers import MtpModel  # noqa: E402

from jaxpipe.checkpoint.hf.parameters import export_huggingface, import_huggingface  # noqa: E402
from jaxpipe.checkpoint.hf.serving import ServingFiles  # noqa: E402
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint  # noqa: E402
from jaxpipe.config import ConfigError  # noqa: E402

WEIGHT = 0.3
OWN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
# Of Qwen3-Next and Qwen3.5, by vLLM's `qwen3_next_mtp.py` and `qwen3_5_mtp.py`, whose equations are
# those of `MtpModel`: the layer is apart from the others, and has attention.
APART = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
    "post_norm": "norm",
}  # fmt: skip
QWEN = "qwen3_next", "qwen3_5", "qwen3_5_moe"
NAMES = "deepseek_v3", "glm4_moe", *QWEN


class Predicting(records.Record):
    """A record of a model with its layer that predicts a further token."""

    @property
    def settings(self):
        return super().settings | {"mtp_depth": 1, "mtp_weight": WEIGHT}


def learned(model, ahead):
    """Return the parameters of the model, and of its predictions, by names of the model."""
    found, last = dict(record.learned(model)), f"model.layers.{model.config.num_hidden_layers}."
    is_apart = model.config.model_type.startswith("qwen")
    own, block = (APART, "layers.0.") if is_apart else (OWN, "")
    for name, one in ahead.layers[0].named_parameters():
        place, _, rest = name.partition(".")
        rest = block + rest if place == "mtp_block" else f"{own[place]}.{rest}"
        found[("mtp." if is_apart else last) + rest] = one
    return found


def cross_entropy(logits, targets):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=record.IGNORE
    )


def first_step(name):
    """Return a record of the first step of a model that predicts a further token."""
    record.build(name)  # modules imported here must not see float32 replaced
    with record.float64():
        model, (tokens, ignored) = record.build(name), record.batches()
        model.config.num_mtp_layers = 1
        if name in QWEN:
            model.config.mtp_layer_types = ["full_attention"]
        ahead, family = MtpModel(model, 1), model.config.model_type
        ahead.to(torch.float64)
        named = learned(model, ahead)
        arrays = record.published({n: one.detach().numpy() for n, one in named.items()}, family)
        first = {own: record.drawn(own, array.shape) for own, array in arrays.items()}
        with torch.no_grad():
            wide = {own: array.astype(np.float64) for own, array in first.items()}
            for own, value in record.of_model(named, wide, family).items():
                named[own].copy_(torch.from_numpy(value))
        rows = torch.from_numpy(tokens[0].reshape(-1, tokens.shape[-1]).astype(np.int64))
        hidden = torch.from_numpy(ignored[0].reshape(-1, ignored.shape[-1]))
        targets, inputs = torch.where(hidden, record.IGNORE, rows[:, 1:]), rows[:, :-1]
        found = model(inputs, output_hidden_states=True)
        positions = torch.arange(1, inputs.shape[1]).expand(len(inputs), -1)
        stream = ahead.forward_layer(
            0, found.hidden_states[-1][:, :-1], positions, None, input_ids=inputs[:, 1:]
        )
        loss = cross_entropy(found.logits, targets)
        (loss + WEIGHT * cross_entropy(model.lm_head(stream), targets[:, 1:])).backward()
        gradients = record.published({n: one.grad.numpy() for n, one in named.items()}, family)
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    for field in ("num_mtp_layers", "mtp_layer_types") if name in QWEN else ():
        del config[field]  # which no published file has
    shapes = {own: array.shape for own, array in first.items()}
    kept = Predicting({
        "config": np.array(json.dumps(config)), "shapes": np.array(json.dumps(shapes)),
        "tokens": tokens, "ignored": ignored, "weights": record.end_to_end(first),
        "gradients": record.end_to_end(gradients),
    })  # fmt: skip
    return loss.item(), kept


LAYOUTS = {
    "one device": {},
    "pp 2, tp 2": {
        "pp": 2, "tp": 2, "schedule": "zb_h1", "sequence_parallel": True, "layer_split": [2, 3],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_files(tmp_path, name):
    """Its tensors have their published names; with `mtp_depth=0` they are left out."""
    _, kept = first_step(name)
    tensors, rng = kept.by_their_names("weights"), np.random.default_rng(0)
    last, hf, copies = "mtp." if name in QWEN else "model.layers.4.", tmp_path / "hf", {}
    if name not in QWEN:
        for place in [n.partition(".gate.")[0] for n in tensors if n.endswith("mlp.gate.weight")]:
            tensors[f"{place}.gate.e_score_correction_bias"] = rng.normal(size=4).astype(np.float32)
        copies = {
            f"{last}embed_tokens.weight": tensors["model.embed_tokens.weight"],
            f"{last}shared_head.head.weight": tensors["lm_head.weight"],
        }
    hf.mkdir()
    save_file(tensors | copies, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps(kept.config_json))
    model = records.trainer_of(kept, {}).config.model
    without = {n: tensor for n, tensor in tensors.items() if not n.startswith(last)}
    for depth, held in ((0, without), (1, tensors)):
        model, out = replace(model, mtp_depth=depth), tmp_path / f"out{depth}"
        step = import_huggingface(hf, model, tmp_path / f"c{depth}", {})
        export_huggingface(
            StoredCheckpoint(step), model, out, serving=ServingFiles(), dtype="float32",
            max_positions=64, max_shard_bytes=10**9,
        )  # fmt: skip
        assert_same_bytes(all_tensors(out), held)
        field = f"{'mtp_num_hidden' if 'qwen3_5' in name else 'num_nextn_predict'}_layers"
        assert json.loads((out / "config.json").read_text())[field] == depth
    with pytest.raises(ConfigError, match="one further token at most"):
        export_huggingface(
            StoredCheckpoint(step), replace(model, mtp_depth=2), tmp_path, serving=ServingFiles(),
            dtype="float32", max_positions=64, max_shard_bytes=10**9,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_every_gradient(name, layout):
    wanted, kept = first_step(name)
    loss, gradients = records.loss_and_gradients(kept, LAYOUTS[layout])
    np.testing.assert_allclose(loss, wanted, rtol=1e-13)
    want = kept.by_our_names("gradients", records.trainer_of(kept, {}).config.model)
    assert gradients.keys() == want.keys()
    for path, expected in want.items():
        largest = np.abs(expected).max()
        assert largest > 1e-4, path
        np.testing.assert_allclose(
            gradients[path] / largest, expected / largest, rtol=0, atol=1e-12
        )
