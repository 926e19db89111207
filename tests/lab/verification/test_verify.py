"""`verify`: a right configuration passes, every planted fault is named, a bad one is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe import config as configs
from jaxpipe import verify
from jaxpipe.lab.verification.faults import FAULTS
from jaxpipe.lab.verification.observed import Observed, compare
from jaxpipe.lab.verification.self_test import plant
from jaxpipe.lab.verification.shrinking import shrink
from jaxpipe.lab.verification.verifying import Verification
from jaxpipe.planning.rules.across import check_settings

SMALL = """
[model]
n_layers = 4
d_model = 64
n_heads = 8
n_kv_heads = 4
d_ff = 96
vocab_size = 97
[parallel]
pp = 2
dp = 2
[train]
steps = 100
grad_accum_steps = 16
microbatch_size = 4
seq_len = 64
[optimizer]
warmup_steps = 50
"""
OTHERS = {
    "ahead": (
        "family = 'deepseek'\nq_lora_rank = 32\nkv_lora_rank = 24\nqk_nope_head_dim = 16\n"
        "qk_rope_head_dim = 8\nv_head_dim = 16\nmtp_depth = 1\nn_experts = 8\n"
        "experts_per_token = 2\nexpert_groups = 4\ngroups_per_token = 2\nshared_experts = 1",
        ("parallel.ep=2", "parallel.schedule=dualpipev", "data.packing=sequential"),
    ),
    "indexed": (
        "family = 'deepseek'\nq_lora_rank = 32\nkv_lora_rank = 24\nqk_nope_head_dim = 16\n"
        "qk_rope_head_dim = 8\nv_head_dim = 16\nindex_topk = 64\nindex_n_heads = 4\n"
        "index_head_dim = 16",
        ("parallel.tp=2", "parallel.slices=2", "train.remat=full"),
    ),
    "shared_index": (
        "family = 'deepseek'\nq_lora_rank = 32\nkv_lora_rank = 24\nqk_nope_head_dim = 16\n"
        "qk_rope_head_dim = 8\nv_head_dim = 16\nindex_topk = 64\nindex_n_heads = 4\n"
        "index_head_dim = 16\nindex_group = 2\nindex_first = 1\nn_experts = 4\n"
        "experts_per_token = 2\nfirst_dense_layers = 2\nmtp_depth = 1",
        ("parallel.ep=2", "parallel.slices=2", "train.remat=full"),
    ),
    "engram": (
        "family = 'engram'\nn_kv_heads = 2\nngram_layers = [1, 2]\nngram_rows = 1000\n"
        "ngram_width = 16\nn_experts = 4\nexperts_per_token = 2",
        ("parallel.cp=2", "parallel.tp=2", "parallel.slices=2", "data.packing=best_fit"),
    ),
    "deepseek_v4": (
        "family = 'deepseek_v4'\nhead_dim = 16\nqk_rope_head_dim = 8\nq_lora_rank = 24\n"
        "o_groups = 4\no_lora_rank = 16\nindex_n_heads = 4\nindex_head_dim = 16\n"
        "index_topk = 8\nsliding_window = 16\nhca_rate = 16\nn_experts = 4\n"
        "experts_per_token = 2\nnum_hash_layers = 1\nrope_original_positions = 64",
        ("parallel.cp=2", "parallel.slices=2", "data.packing=best_fit", "parallel.schedule=zb_h1"),
    ),
    "qwen3_next": (
        "family = 'qwen3_next'\nn_kv_heads = 2\nhead_dim = 16\nattention_every = 2\n"
        "n_experts = 4\nexperts_per_token = 2\nd_expert = 32\ndelta_key_heads = 4\n"
        "delta_value_heads = 8\ndelta_key_dim = 16\ndelta_value_dim = 16\ndelta_chunk = 16",
        ("parallel.cp=2", "parallel.ep=2", "parallel.slices=2", "data.packing=best_fit"),
    ),
    "kimi_linear": (
        "family = 'kimi_linear'\nkv_lora_rank = 24\nqk_nope_head_dim = 16\n"
        "qk_rope_head_dim = 8\nv_head_dim = 16\nattention_every = 2\nn_experts = 4\n"
        "experts_per_token = 2\nd_expert = 32\ndelta_heads = 4\ndelta_head_dim = 16\n"
        "delta_chunk = 16",
        ("parallel.tp=2", "parallel.zero_stage=3", "parallel.schedule=zb_h1"),
    ),
    "nemotron_h": (
        "family = 'nemotron_h'\nn_kv_heads = 4\nlayer_pattern = 'M-E*'\nn_experts = 4\n"
        "experts_per_token = 2\nmamba_heads = 8\nmamba_head_dim = 16\nmamba_groups = 4\n"
        "mamba_state = 16\nmamba_chunk = 16",
        ("parallel.cp=2", "parallel.slices=2", "data.packing=best_fit", "train.remat=full"),
    ),
    "llama4": (
        "family = 'llama4'\nn_kv_heads = 4\nattention_chunk = 16\ntemperature_floor = 16\n"
        "nope_every = 2\nn_experts = 4\nexperts_per_token = 1",
        ("parallel.ep=2",),
    ),
    "gpt_oss": (
        "family = 'gpt_oss'\nn_kv_heads = 4\nsliding_window = 16\nn_experts = 4\n"
        "experts_per_token = 2",
        ("parallel.ep=2", "model.capacity_factor=1.0", "parallel.schedule=zb_h1"),
    ),
    "gemma3": (
        "family = 'gemma3'\nn_kv_heads = 4\nsliding_window = 16\nglobal_every = 2\n"
        "logit_softcap = 30.0",
        ("parallel.tp=2", "parallel.dp=1", "parallel.vocab_parallel_pp=true"),
    ),
    "gpt2": (
        "family = 'gpt2'",
        ("parallel.tp=2", "parallel.cp=2", "parallel.cp_method=ulysses", "train.remat=full"),
    ),
}
MIXTURE = (
    "model.n_experts=16", "model.experts_per_token=4", "model.router_aux_loss=0.1",
    "model.router_bias_rate=0.01", "parallel.ep=2", "parallel.dp=4", "model.first_dense_layers=1",
    "parallel.schedule=zb_h1",
)  # fmt: skip
PAIRS = (
    "train.loss=dpo", "data.source=file", "data.path=pairs", "train.variable_length=true",
    "parallel.dp=1", "train.loss_chunks=2",
)  # fmt: skip
LOOP = ("parallel.pp=1", "parallel.dp=1", "model.n_layers=8")
CASES = {
    "packed": ("data.packing=best_fit", "parallel.pp=1"),
    "ring": ("parallel.cp=2", "parallel.cp_method=ring", "train.loss_chunks=2"),
    "mixture": MIXTURE,
    "tensor": (
        "parallel.tp=2", "parallel.dp=1", "parallel.sequence_parallel=true",
        "model.tie_embeddings=true", "train.z_loss=0.1",
    ),
    "sliced": (
        "parallel.slices=4", "parallel.schedule=interleaved_1f1b", "parallel.zero_stage=2",
        "model.sliding_window=40", "optimizer.name=muon",
    ),
    "uneven": ("model.n_layers=7", "model.dropout=0.1", "parallel.dp_replicate=2"),
    "variable": ("train.variable_length=true", *MIXTURE),
    "pairs": PAIRS,
    "loop": LOOP,
    "loop that gathers": (
        "parallel.pp=1", "parallel.zero_stage=3", "parallel.unroll_layers=2", "model.n_layers=8",
    ),
    "offloaded": ("model.n_layers=8", "train.offload_layers=1"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "small.toml"
    path.write_text(SMALL)
    return path


def verification(path, *overrides):
    config = configs.load(path, overrides)
    check_settings(config)
    smaller = shrink(config).config
    check_settings(smaller)
    return Verification(smaller, lambda line: None)


@pytest.fixture(scope="module")
def plain(path):
    return verification(path)


def test_a_run_equals_the_reference(plain):
    found = plain.deviations()
    assert len(found) == 10
    assert [one for one in found if not one.error <= verify.TOLERANCE] == []
    assert any(one.error > 0 for one in found), "both sides are one program"


def test_a_planted_fault_is_named(plain):
    (fault,) = (fault for fault in FAULTS if fault.name == "two layers are swapped")
    assert plant(plain, fault).error > 1e-3


def test_a_fault_in_a_loop_over_layers_is_named(path):
    run = verification(path, *LOOP, "train.grad_accum_steps=1", "train.remat=none")
    (fault,) = (fault for fault in FAULTS if fault.run)
    assert fault.applies(run.trainer)
    assert plant(run, fault).error > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_combinations_equal_the_reference(path, overrides):
    found = verification(path, *overrides).deviations()
    assert [one for one in found if not one.error <= verify.TOLERANCE] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_families_equal_the_reference(tmp_path, name):
    fields, overrides = OTHERS[name]
    path = tmp_path / "other.toml"
    path.write_text(SMALL.replace("n_kv_heads = 4", fields))
    found = verification(path, *overrides).deviations()
    assert [one for one in found if not one.error <= verify.TOLERANCE] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture", "tensor", "sliced", "packed", "loop"])
def test_every_fault_is_noticed(path, name):
    run = verification(path, *CASES[name])
    errors = {f.name: plant(run, f).error for f in FAULTS if f.applies(run.trainer)}
    assert [name for name, error in errors.items() if not error > verify.TOLERANCE] == []


def test_a_mesh_of_many_devices_shrinks_and_says_so(path):
    mesh = ["parallel.pp=4", "parallel.dp=8", "parallel.cp=4"]
    checks = ["train.deterministic=true", "train.corruption_check_every=2"]
    how = ["train.compute_dtype=bfloat16", *checks, "train.on_corruption=warn"]
    smaller = shrink(configs.load(path, [*mesh, *how]))
    check_settings(smaller.config)
    assert (smaller.config.parallel.mesh, smaller.config.model.n_layers) == (
        "pp=2 dp=4 cp=2 (gather) tp=1", 2,
    )  # fmt: skip
    assert "parallel.pp: 2 instead of 4" in smaller.changes
    assert smaller.unchecked == (
        "train.compute_dtype='bfloat16': computed in float64 instead",
        "train.corruption_check_every: it repeats steps and changes none",
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.variable_length=true", "train.loss_chunks=4"),
        (
            "train.variable_length=true", "train.loss_chunks=2", "train.pad_to_multiple_of=1",
            "train.length_bucket=6", "train.seq_len=72", "parallel.tp=2", "parallel.slices=3",
            "parallel.sequence_parallel=true",
        ),
        ("parallel.dp=16", "runtime.min_devices=20"),
        PAIRS,
    ],
    ids=["chunks of lengths", "and shards", "fewest devices", "pairs"],
)  # fmt: skip
def test_what_shrinks_keeps_the_rules(path, overrides):
    """On both meshes."""
    assert verification(path, *overrides).other.config.parallel.devices <= 2


def test_the_other_mesh_keeps_a_loop_over_all_layers(path):
    run = verification(path, "model.n_layers=12", "parallel.unroll_layers=2")
    lengths = [list(map(len, trainer.layout.runs)) for trainer in (run.trainer, run.other)]
    assert lengths == [[5], [10]]


def test_a_bad_configuration_is_refused(path, capsys):
    assert verify.main([str(path), "parallel.tp=3"]) == 2
    assert "model.n_heads=8 must be a multiple of parallel.tp=3" in capsys.readouterr().err


@pytest.mark.parametrize("sort", ["losses", "gradients", "update"])
def test_a_reference_that_is_not_finite_proves_nothing(sort):
    arrays = {name: {"a": np.ones(3)} for name in ("losses", "gradients", "update", "metrics")}
    plain = Observed(**arrays)
    assert max(one.error for one in compare(plain, plain)) == 0
    broken = Observed(**arrays | {sort: {"a": np.array([1.0, np.nan, 1.0])}})
    worst = {one.what: one.error for one in compare(broken, broken)}
    assert worst[sort] == float("inf")


def test_rounding_in_place_of_a_gradient_of_zero_is_no_error():
    """Adam divides a gradient by its own size, so that rounding moves the parameter."""

    def observed(gradient, update):
        gradients = {"a": np.ones(3), "b": np.full(3, gradient)}
        updates = {"a": np.ones(3), "b": np.full(3, update), "frozen": np.zeros(3)}
        return Observed({}, gradients, updates, {})

    want = observed(0.0, 0.0)
    assert max(one.error for one in compare(observed(1e-20, 1e-3), want)) < verify.TOLERANCE
    assert max(one.error for one in compare(observed(1e-3, 1e-3), want)) > verify.TOLERANCE
    moved = observed(0.0, 0.0)
    moved.update["frozen"][0] = 1e-3
    assert max(one.error for one in compare(moved, want)) > verify.TOLERANCE


def mean_of_rows(logprobs, rows):
    """A loss that is no sum over tokens: a row's mean, weighed."""
    return -(rows["weight"] * logprobs).mean(-1).sum(), jnp.float32(len(logprobs))


@pytest.mark.slow
def test_a_loss_of_whole_rows_is_compared_on_packed_rows(path):
    own = ["train.loss=test_verify:mean_of_rows", 'train.loss_rows=["weight"]']
    mesh = ["parallel.pp=1", "parallel.dp=1", "train.grad_accum_steps=2", "model.n_layers=1"]
    found = verification(path, *own, *mesh, "data.packing=sequential").deviations()
    assert [one for one in found if not one.error <= verify.TOLERANCE] == []
