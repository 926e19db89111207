"""Gradients of models whose queries attend to chosen keys, against PyTorch in float64.

transformers has no loss of the indexer and computes its scores without gradients. Here PyTorch
computes scores and loss anew, from what transformers' indexer gets and its attention returns.
"""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import record_transformers as record  # noqa: E402
import transformers_models as models  # noqa: E402
import transformers_records as records  # noqa: E402
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (  # noqa: E402
    apply_rotary_pos_emb,
)
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (  # noqa: E402
    apply_rotary_pos_emb_interleave,
)

TOPK = 3
SETTINGS = models.SIZES | models.LATENT | {
    "q_lora_rank": 8, "n_group": 2, "topk_group": 2, "index_topk": TOPK, "index_n_heads": 16,
    "index_head_dim": 6,
}  # fmt: skip
# The name of its classes, how the indexer rotates, and fields of its own.
FAMILIES = {
    "deepseek_v32": ("DeepseekV32", apply_rotary_pos_emb, {}),
    "glm_moe_dsa": ("GlmMoeDsa", apply_rotary_pos_emb_interleave, {}),
    "glm_5_2": (
        "GlmMoeDsa", apply_rotary_pos_emb_interleave,
        {"indexer_types": ["full", "full", "shared", "shared"]},
    ),
}  # fmt: skip
LAYOUTS = {
    "one device": {},
    "pp 2, tp 2": {"pp": 2, "tp": 2, "schedule": "zb_h1", "sequence_parallel": True},
}


def index_scores(indexer, rotate, hidden, latent, position_embeddings):
    """Return index scores `[B, L, L]` of a module of transformers, with gradients."""
    hidden, latent, width = hidden.detach(), latent.detach(), indexer.qk_rope_head_dim
    q = indexer.wq_b(latent).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    rotated = rotate(q[..., :width], k[..., :width], *position_embeddings, unsqueeze_dim=2)
    q, k = (torch.cat([y, x[..., width:]], -1) for y, x in zip(rotated, (q, k)))
    each = torch.relu(torch.einsum("blie,bse->blis", q, k[:, :, 0]) * indexer.head_dim**-0.5)
    weights = indexer.weights_proj(hidden) * indexer.n_heads**-0.5
    return torch.einsum("blis,bli->bls", each, weights)


def indexer_losses(model, rotate):
    """Return a list to which every forward pass adds each layer's loss `[B, L]`."""
    found = []

    def listen(attention):
        given = []
        attention.indexer.register_forward_pre_hook(lambda _, args: given.append(args))

        def add(_, args, output):
            hidden, latent, positions, *_ = given.pop()
            scores = index_scores(attention.indexer, rotate, hidden, latent, positions)
            target = output[1].detach().mean(1)
            seen = torch.ones(scores.shape[1:]).tril() > 0
            chosen = scores.masked_fill(~seen, -torch.inf).topk(TOPK, -1).indices
            mask = torch.zeros(scores.shape).scatter(-1, chosen, 1.0).bool() & seen
            assert torch.equal(mask, target > 0)
            own = torch.log_softmax(scores.masked_fill(~mask, -torch.inf), -1)
            terms = torch.where(mask, target * (target.clamp_min(1e-300).log() - own), 0)
            found.append(terms.sum(-1))

        attention.register_forward_hook(add)

    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            listen(layer.self_attn)
    return found


def first_step(family):
    """Return the record of a step, with the loss of tokens and that of indexers."""
    name, rotate, own = FAMILIES[family]
    of_model = getattr(transformers, f"{name}ForCausalLM")
    config = getattr(transformers, f"{name}Config")(**SETTINGS, **own)
    config._attn_implementation = config._experts_implementation = "eager"
    of_model(config)  # what it imports must not see float32 replaced
    with record.float64():
        model = of_model(config).to(torch.float64).eval()
        tokens, ignored = record.batches()
        named, family = dict(model.named_parameters()), config.model_type
        shapes = record.published(
            {name: tensor.detach().numpy() for name, tensor in named.items()}, family
        )
        first = {name: record.drawn(name, array.shape) for name, array in shapes.items()}
        with torch.no_grad():
            for name, value in record.of_model(named, first, family).items():
                named[name].copy_(torch.from_numpy(value))
        rows = torch.from_numpy(tokens[0].reshape(-1, tokens.shape[-1]).astype(np.int64))
        hidden = torch.from_numpy(ignored[0].reshape(-1, ignored.shape[-1]))
        targets = torch.where(hidden, record.IGNORE, rows[:, 1:])
        losses = indexer_losses(model, rotate)
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        of_indexers = sum(each.mean() for each in losses)
        (loss + of_indexers).backward()
        gradients = {name: tensor.grad.numpy() for name, tensor in named.items()}
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    return records.Record({
        "config": np.array(json.dumps(config)), "tokens": tokens, "ignored": ignored,
        "shapes": np.array(json.dumps({name: array.shape for name, array in first.items()})),
        "weights": record.end_to_end(first),
        "gradients": record.end_to_end(record.published(gradients, family)),
    }), loss.item(), of_indexers.item()  # fmt: skip


@pytest.mark.extended
@pytest.mark.slow(unless=["one device*"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_every_gradient(layout, family):
    kept, loss, of_indexers = first_step(family)
    assert of_indexers > 0.1
    found, gradients = records.loss_and_gradients(kept, LAYOUTS[layout])
    np.testing.assert_allclose(found, loss, rtol=1e-12)
    want = kept.by_our_names("gradients", records.trainer_of(kept, {}).config.model)
    assert gradients.keys() == want.keys()
    for path, expected in want.items():
        largest = np.abs(expected).max()
        assert largest > 1e-5, path
        np.testing.assert_allclose(
            gradients[path] / largest, expected / largest, rtol=0, atol=1e-10, err_msg=str(path)
        )
