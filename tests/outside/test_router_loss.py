"""The load-balance loss against transformers' own: value, gradients, and its coefficient.

Both are the same function of one sequence and one sparse layer. With several layers transformers
takes shares over the tokens of all of them together, so all layers get the same logits here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import stored_params
from msgspec.structs import replace

from jaxpipe.checkpoint.hf.parameters import hf_format, import_huggingface
from jaxpipe.core.executor import step_ref
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.layers.moe.balance import Balance
from jaxpipe.model.layers.moe.router import Routes
from jaxpipe.model.loss import IGNORE

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 48, "vocab_size": 64,
    "rope_theta": 1e4, "norm_eps": 1e-6, "qk_norm": True, "n_experts": 8, "d_expert": 24,
}  # fmt: skip


def coefficient(model):
    """Return the coefficient that an export of the model writes."""
    fields = hf_format(model).written(model.resolved(), "float32", 64)
    return fields["router_aux_loss_coef"]


def balance_loss(model, logits_SLE):
    """Return jaxpipe's loss of one sequence, a mean over its tokens, summed over layers."""
    balance, total = Balance(model.resolved()), 0.0
    for layer, logits_LE in zip(model.sparse_layers, logits_SLE):
        shares_BLE = jax.nn.softmax(logits_LE)[None]
        choice_BLK = jax.lax.top_k(shares_BLE, model.experts_per_token)[1]
        routes = Routes(choice_BLK, choice_BLK, logits_LE[None], shares_BLE)
        aux = balance.aux_outputs(routes, jnp.int32(0), jnp.int32(layer))
        total += sum(aux.loss_sums.values()) / len(logits_LE)
    return total


@pytest.mark.parametrize(("layers", "each", "dense"), [(1, 2, 0), (6, 2, 0), (7, 3, 2), (5, 1, 1)])
def test_an_exported_coefficient_weighs_as_the_run_did(layers, each, dense):
    model = LlamaConfig(
        **SIZES, n_layers=layers, experts_per_token=each, first_dense_layers=dense,
        router_aux_loss=0.02,
    )  # fmt: skip
    sparse = len(model.sparse_layers)
    logits_LE = np.random.default_rng(0).normal(size=(13, 8)).astype(np.float32)
    logits_SLE = np.stack([logits_LE] * sparse)
    ours, gradient = jax.value_and_grad(lambda logits: balance_loss(model, logits))(logits_SLE)
    gates = tuple(torch.tensor(logits, requires_grad=True) for logits in logits_SLE)
    module = transformers.models.qwen3_moe.modeling_qwen3_moe
    theirs = coefficient(model) * module.load_balancing_loss_func(gates, 8, each)
    theirs.backward()
    assert float(ours) == pytest.approx(theirs.item(), rel=1e-6)
    their_gradient = np.stack([gate.grad.numpy() for gate in gates])
    np.testing.assert_allclose(gradient, their_gradient, rtol=1e-5, atol=1e-9)


def test_even_loads_cost_as_much_as_in_transformers():
    """Experts in turn, with equal scores: K in all layers there, 1 in each of S layers here."""
    model = LlamaConfig(**SIZES, n_layers=6, experts_per_token=2, router_aux_loss=0.02)
    even = np.zeros((4, 8), np.float32)
    even += 1e-6 * np.kron(np.eye(4), np.ones((1, 2)))  # selects the two experts of a token
    module = transformers.models.qwen3_moe.modeling_qwen3_moe
    theirs = module.load_balancing_loss_func((torch.tensor(even),) * 6, 8, 2)
    assert theirs.item() == pytest.approx(2, rel=1e-5)
    ours = balance_loss(model, np.stack([even] * 6))
    assert float(ours) == pytest.approx(0.02 * 6, rel=1e-5)
    assert coefficient(model) * theirs.item() == pytest.approx(float(ours), rel=1e-5)


@pytest.mark.parametrize("targets", [40, 2])
def test_a_masked_prompt_trains_the_router_as_in_transformers(tmp_path, targets):
    """Loss and gradients of a Qwen3-MoE whose second layer is sparse, with few target tokens."""
    model = LlamaConfig(
        **SIZES, n_layers=2, experts_per_token=2, first_dense_layers=1, router_aux_loss=0.05
    )
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48, moe_intermediate_size=24, vocab_size=64,
        num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[0],
        rope_theta=1e4, tie_word_embeddings=False, initializer_range=0.3,
        router_aux_loss_coef=coefficient(model), output_router_logits=True,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Qwen3MoeForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    ids = np.random.default_rng(1).integers(0, 64, (1, 41))
    labels = np.where(np.arange(41) >= 41 - targets, ids, IGNORE)
    made = theirs(torch.tensor(ids[:, :-1]), output_router_logits=True)
    goals = torch.tensor(labels[:, 1:])
    cross_entropy = torch.nn.functional.cross_entropy(made.logits[0], goals[0], ignore_index=IGNORE)
    (cross_entropy + config.router_aux_loss_coef * made.aux_loss).backward()

    step = import_huggingface(tmp_path / "hf", replace(model), tmp_path / "c", {})
    params = stored_params(step)
    layers = [params["layers"][str(i)] for i in range(2)]
    batch = {"inputs": jnp.asarray(ids[None, :, :-1]), "targets": jnp.asarray(labels[None, :, 1:])}
    ours = step_ref(LlamaDecoder(model).functions, params["embed_head"], layers, batch)
    assert float(ours.losses.sum()) == pytest.approx(cross_entropy.item(), rel=1e-5)
    added = config.router_aux_loss_coef * made.aux_loss.item()
    assert float(ours.aux_losses.sum()) == pytest.approx(added, rel=1e-5)
    named = dict(theirs.named_parameters())
    for ours_at, name in (
        (ours.gradients["layers"][1]["moe"]["router"]["gate"], "model.layers.1.mlp.gate.weight"),
        (ours.gradients["layers"][1]["attn"]["wq"], "model.layers.1.self_attn.q_proj.weight"),
        (ours.gradients["layers"][0]["mlp"]["w_up"], "model.layers.0.mlp.up_proj.weight"),
    ):
        want = named[name].grad.numpy().T
        error = np.linalg.norm(ours_at - want) / np.linalg.norm(want)
        assert error < 1e-5, name
