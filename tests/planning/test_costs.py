"""Traced costs of the decoder against closed forms of its FLOPs and bytes. All exact."""

import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import jax
import msgspec
import pytest
from oracles.decoder import (
    end_leaves,
    head_flops,
    hidden_bytes,
    layer_bytes,
    layer_flops,
    layer_leaves,
    state_bytes,
)
from oracles.flops import OpFlops

from jaxpipe.config import Config, DataConfig, ParallelConfig, TrainConfig
from jaxpipe.core.contract import Context
from jaxpipe.core.split import POLICIES, split_layer
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.planning.cost.costs import costs_of

ROOT = Path(__file__).parents[2]
BATCH, LENGTH = 3, 16
GROUPED = {"n_heads": 4, "n_kv_heads": 2}
SHAPES = [GROUPED, {"n_heads": 4, "n_kv_heads": 4}, {"n_heads": 4, "n_kv_heads": 1}]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def model_of(**sizes):
    plain = {"n_layers": 2, "d_model": 24, "head_dim": 8, "d_ff": 40, "vocab_size": 64}
    return LlamaConfig(**(plain | GROUPED | sizes))


def traced(
    model, dtype="float32", remat="none", *, batch=BATCH, length=LENGTH, chunks=1, packing="none",
    loss=("cross_entropy",), **how,
):  # fmt: skip
    train = TrainConfig(
        steps=1, grad_accum_steps=1, microbatch_size=batch, seq_len=length,
        compute_dtype=dtype, remat=remat, loss_chunks=chunks, loss=loss[0], loss_rows=loss[1:],
    )  # fmt: skip
    if heads := how.pop("heads", 0):
        how |= {"cp_method": "ring", "cp_heads": heads}
    parallel, data = ParallelConfig(dp=how.get("cp", 1), **how), DataConfig(packing=packing)
    return costs_of(Config(model=model, parallel=parallel, train=train, data=data))


def check(model, dtype="float32", remat="none", *, batch=BATCH, length=LENGTH, **how):
    """Check all that closed forms give for one layer, the head and a message."""
    costs = traced(model, dtype, remat, batch=batch, length=length, **how)
    layer, itemsize = costs.kinds["layer"], ITEMSIZE[dtype]
    stream = {"sequence_parallel": how.pop("sequence_parallel", False)}
    sizes = {"batch": batch, "seq_len": length} | how
    stored = layer_bytes(model, itemsize=itemsize, remat=remat, **sizes, **stream)
    assert (layer.for_b, layer.for_w, layer.stash) == (stored.for_b, stored.for_w, stored.stash)
    work = layer_flops(model, remat=remat, **sizes)
    assert (layer.F, layer.B, layer.W) == (work.F, work.B, work.W)
    heads = sizes.pop("heads", 0)
    head = head_flops(model, **sizes)
    assert costs.head.flops() == head.F + head.B + head.W
    assert costs.message == hidden_bytes(model, itemsize=itemsize, **sizes, **stream)
    sliced, tp = how.get("slices", 1) > 1, how.get("tp", 1)
    shared = {"tp": tp, "cp": how.get("cp", 1), "heads": heads}
    state = state_bytes(model, batch=batch, seq_len=length, itemsize=itemsize, **shared)
    assert layer.state == sliced * state


CASES = list(product(POLICIES, ["float32", "bfloat16", "float16"], [False, True]))


@pytest.mark.slow(unless=["grouped-*-bfloat16-True"])
@pytest.mark.parametrize(("remat", "dtype", "qk_norm"), CASES)
@pytest.mark.parametrize("heads", SHAPES, ids=["grouped", "own", "shared"])
def test_bytes_and_flops(remat, dtype, qk_norm, heads):
    check(model_of(qk_norm=qk_norm, **heads), dtype, remat)


@pytest.mark.slow(unless=["*-selective"])
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize(("length", "share"), [(256, 3 / 4), (258, 3 / 4), (257, 1)])
def test_bytes_and_flops_of_blocks_of_queries(remat, length, share):
    """Long sequences: a block of queries computes and stores no scores of later keys."""
    check(model_of(), "float32", remat, length=length)
    layer = traced(model_of(), length=length).kinds["layer"]
    attention = share * 4 * BATCH * length**2 * 4 * 8
    assert layer.W + attention == layer.F  # F has as many matmul FLOPs with weights as W


@pytest.mark.slow(unless=["selective-*"])
@pytest.mark.parametrize(
    ("window", "keys"), [(16, (128 + 143) / 2), (129, 192), (300, 192), (1, 128)]
)
@pytest.mark.parametrize("remat", POLICIES)
def test_bytes_and_flops_of_a_window(remat, window, keys):
    """A block of 128 queries computes scores of its own keys and of its first query's window."""
    check(model_of(sliding_window=window), "float32", remat, length=256)
    layer = traced(model_of(sliding_window=window), length=256).kinds["layer"]
    assert layer.W + 4 * BATCH * 256 * keys * 4 * 8 == layer.F
    with_window, without = (
        traced(model_of(sliding_window=width, attention="cudnn"), length=256).kinds["layer"]
        for width in (window, 0)
    )
    assert layer.F <= with_window.F <= without.F  # tiles of 128 keys and queries


@pytest.mark.slow(unless=["*-selective-*"])
@pytest.mark.parametrize("how", [{"length": 256}, {"slices": 2, "cp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("attention", ["xla", "cudnn"])
def test_borders_of_documents_cost_nothing(attention, remat, how):
    """Neither FLOPs nor stored bytes: the mask is recomputed from the rows."""
    whole, packed = (
        traced(model_of(attention=attention), "bfloat16", remat, packing=packing, **how)
        for packing in ("none", "best_fit")
    )
    sizes = [
        (kind.F, kind.B, kind.W, kind.for_b, kind.for_w, kind.stash, kind.state)
        for kind in (whole.kinds["layer"], packed.kinds["layer"])
    ]
    assert sizes[0] == sizes[1]
    assert (whole.head, whole.message) == (packed.head, packed.message)


@pytest.mark.parametrize("how", [{"slices": 4}, {"cp": 2}], ids=str)
def test_parts_of_sequences_make_all_scores_with_a_window_too(how):
    check(model_of(sliding_window=3), "float32", "none", **how)
    windowed, every = traced(model_of(sliding_window=3), **how), traced(model_of(), **how)
    (mine,), (other,) = windowed.kinds.values(), every.kinds.values()
    assert replace(windowed, kinds={}) == replace(every, kinds={})
    assert replace(mine, working={}, kernels={}) == replace(other, working={}, kernels={})


@pytest.mark.extended(only=["{'cp': 4, *"])
@pytest.mark.slow(unless=["*-selective-bfloat16-True", "{'cp': 4, 'heads': 2}-none-float32-False"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("remat", "dtype"), [("none", "float32"), ("selective", "bfloat16"), ("full", "float32")]
)
@pytest.mark.parametrize(
    "how", [{"slices": 4}, {"cp": 2}, {"cp": 2, "slices": 2}, {"cp": 2, "heads": 1},
            {"cp": 2, "heads": 2}, {"cp": 4, "heads": 4, "slices": 2}, {"cp": 4, "heads": 2},
            {"cp": 2, "heads": 1, "slices": 4}, {"cp": 4, "heads": 2, "slices": 2}],
    ids=str,
)  # fmt: skip
def test_bytes_and_flops_of_parts_of_sequences(remat, dtype, qk_norm, how):
    """Keys and values of slices are in the state, which B receives instead of residuals."""
    check(model_of(qk_norm=qk_norm), dtype, remat, **how)


@pytest.mark.slow(
    only=[
        "xla-{'cp': 2, 'heads': 1}",
        "xla-{'cp': 4, 'heads': 1}",
        "xla-{'slices': 4}",
        "xla-{'cp': 4, 'heads': 2}",
        "xla-{'cp': 2, 'heads': 1, 'slices': 4}",
    ]
)
@pytest.mark.parametrize(
    "how", [{"cp": 2, "heads": 1}, {"cp": 4, "heads": 1}, {"cp": 4, "heads": 4}, {"slices": 4},
            {"cp": 4, "heads": 2}, {"cp": 2, "heads": 1, "slices": 4}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("attention", ["xla", "cudnn"])
def test_attention_costs_the_causal_half(how, attention):
    """For long sequences 3 % more, and B recomputes the scores once; none of them is stored.

    cuDNN's kernel skips tiles where plain products skip blocks of equally many tokens.
    """
    length, parts, model = 4096, how.get("cp", 1) * how.get("slices", 1), model_of()
    model = msgspec.structs.replace(model, attention=attention)
    check(model, "bfloat16", batch=1, length=length, **how)
    layer = traced(model, "bfloat16", batch=1, length=length, **how).kinds["layer"]
    half = 2 * 2 * length * (length / 2) * 4 * 8 / parts
    weights = layer.W
    assert half < layer.F - weights < 1.04 * half
    assert layer.B - weights == 2.5 * (layer.F - weights)


@pytest.mark.slow(unless=["cudnn-4-2-*"])
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize(("cp", "heads"), [(2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("attention", ["xla", "cudnn"])
def test_what_is_sent_to_those_that_share_sequences(attention, cp, heads, slices):
    """Keys and values of a layer; a ring also sends their positions, and in B wide gradients.

    With two slices a layer sees half of the other slice's keys on average.
    """
    length, model = 64, model_of(attention=attention)
    how = {"batch": 1, "length": length, "cp": cp, "heads": heads, "slices": slices}
    layer = traced(model, "bfloat16", **how).kinds["layer"]
    own, width = length // (cp * slices), model.head_size
    keys, queries = (2 * own * count * width * 2 for count in (model.n_kv_heads, model.n_heads))
    turned = dict.fromkeys("FBWR", 0)
    if heads:
        copied = keys * max(1, heads // model.n_kv_heads)
        exchanged = (queries + copied) * (heads - 1) / heads
        want = {"F": exchanged, "B": exchanged, "W": 0, "R": 0}
        if (ring := cp // heads) > 1:
            places, rounds = 4 * own * heads, (slices + 1) / 2
            forwards = (ring - 1) * (copied + places) * rounds
            turned |= {"F": forwards, "B": forwards + ring * 2 * copied * rounds}
    else:
        want = {"F": (cp - 1) * keys, "B": (1 + (slices == 1)) * (cp - 1) * keys, "W": 0, "R": 0}
    assert layer.turned == turned
    assert layer.shared == {op: want[op] + turned[op] for op in want}


@pytest.mark.slow(unless=["grouped-cudnn-*"])
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("attention", ["xla", "cudnn"])
@pytest.mark.parametrize("heads", SHAPES, ids=["grouped", "own", "shared"])
def test_bytes_and_flops_of_devices_that_share_layers(remat, sequence, attention, heads):
    model = model_of(qk_norm=True, attention=attention, **heads)
    check(model, "bfloat16", remat, tp=2, sequence_parallel=sequence)


@pytest.mark.slow(unless=["*-selective"])
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize(
    ("sizes", "batch", "length"), [({}, 1, 16), ({}, 2, 1), ({"head_dim": 2, "d_ff": 7}, 1, 3)]
)
def test_bytes_of_odd_sizes(remat, sizes, batch, length):
    check(model_of(**sizes), "bfloat16", remat, batch=batch, length=length)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_head_in_chunks_makes_the_same_products(chunks):
    model = model_of()
    assert traced(model, chunks=chunks).head.flops() == traced(model).head.flops()


def weighted(logprobs, rows):
    return (rows["weights"] * logprobs).sum(), logprobs.size


@pytest.mark.parametrize("loss", [("dpo",), (f"{__name__}:weighted", "weights")])
def test_a_loss_of_log_probabilities_makes_logits_of_chunks_twice(loss):
    plain, chunked = (traced(model_of(), batch=4, chunks=n, loss=loss) for n in (1, 2))
    assert chunked.head.flops() == 4 / 3 * plain.head.flops()
    # As of the cross-entropy, the logits of one chunk are live, and the gradients of both.
    cross_entropy = traced(model_of(), batch=4, chunks=2)
    assert chunked.head_bytes == pytest.approx(cross_entropy.head_bytes, rel=0.01)
    assert chunked.head_bytes < 0.8 * plain.head_bytes


@pytest.mark.slow(only=["False-none", "True-none"])
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_stand_in_leaves_what_the_fused_kernel_leaves(remat, qk_norm, monkeypatch):
    """Only tracing: the checks for a GPU and its library are disabled."""
    fused = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{fused}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{fused}.check_compute_capability", lambda _: True)
    model = model_of(qk_norm=qk_norm, attention="cudnn", head_dim=64)
    decoder = LlamaDecoder(model)
    params = jax.eval_shape(lambda: decoder.init_layer(jax.random.key(0), 0))
    x = jax.ShapeDtypeStruct((BATCH, 128, model.d_model), "bfloat16")
    ids = jax.ShapeDtypeStruct((BATCH, 128), "int32")
    context = Context({"inputs": ids, "targets": ids}, jax.ShapeDtypeStruct((), "int32"))
    split = split_layer(decoder.layer, params, x, context, POLICIES[remat])
    size = lambda leaves: sum(prod(a.shape) * a.dtype.itemsize for a in leaves)  # noqa: E731
    layer = traced(model, "bfloat16", remat, length=128).kinds["layer"]
    assert (layer.for_b, layer.for_w, layer.stash) == (
        *map(size, split.residuals[:2]),
        size(split.stash),
    )
    check(model, "bfloat16", remat, length=128)


def test_flops_of_fused_attention():
    """B of fused attention has five products; nothing of it is recomputed outside the kernel."""
    plain, fused = model_of(), model_of(attention="cudnn")
    score = 2 * BATCH * LENGTH**2 * 4 * 8
    for remat, other in (("none", "none"), ("selective", "none"), ("full", "full")):
        ours, theirs = (
            traced(fused, "float32", remat).kinds["layer"],
            traced(plain, "float32", other).kinds["layer"],
        )
        assert (theirs.F, theirs.B + score, theirs.W) == (ours.F, ours.B, ours.W)


@pytest.mark.parametrize("window", [0, 1, 5])
def test_causal_attention_counts_the_pairs_that_the_mask_lets_through(window):
    model = model_of(sliding_window=window)
    full = layer_flops(model, batch=BATCH, seq_len=LENGTH)
    half = layer_flops(model, batch=BATCH, seq_len=LENGTH, causal=True)
    seen = sum(i - (window or LENGTH) < j <= i for i in range(LENGTH) for j in range(LENGTH))
    left_out = 2 * 2 * BATCH * (LENGTH**2 - seen) * 4 * 8
    assert half + OpFlops(F=left_out, B=2 * left_out) == full


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_parameters_are_those_of_the_closed_form(qk_norm, tied, tp):
    model = model_of(qk_norm=qk_norm, tie_embeddings=tied)
    costs = traced(model, tp=tp)

    def plain(leaf, shape):
        return shape, tuple(cut for cut in leaf.sharded if cut[0] == "tp" and tp > 1), leaf.matrix

    for parameters, leaves in (
        (costs.kinds["layer"].parameters, layer_leaves(model, tp)),
        (costs.embed_head, end_leaves(model)),
    ):
        want = [plain(leaf, leaf.shape) for leaf in leaves.values()]
        shapes, specs = map(jax.tree.leaves, parameters)
        found = [plain(spec, array.shape) for array, spec in zip(shapes, specs)]
        assert sorted(map(str, found)) == sorted(map(str, want))
    total = lambda parameters: sum(prod(p.shape) for p in jax.tree.leaves(parameters.shapes))  # noqa: E731
    layers = model.n_layers * total(costs.kinds["layer"].parameters)
    assert layers + total(costs.embed_head) == model.parameter_count()


@pytest.mark.extended
def test_planning_touches_no_device():
    """In a separate process: in this one devices are already initialized."""
    code = """
from pathlib import Path
import jax
from jax._src.xla_bridge import backends_are_initialized
from jaxpipe import config
from jaxpipe.planning.cost.costs import costs_of
assert costs_of(config.load(Path("configs/quickstart.toml"))).message
assert not backends_are_initialized()
assert jax.devices() and backends_are_initialized()
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
