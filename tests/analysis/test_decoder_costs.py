"""The decoder's FLOPs and bytes against what its layer, cut into F, B and W, computes and stores.

Every comparison is exact.
"""

from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import pytest
from counting import dot_flops

from jaxpipe.analysis import (
    LayerBytes,
    OpFlops,
    end_leaves,
    head_flops,
    hidden_bytes,
    layer_bytes,
    layer_flops,
    layer_leaves,
    state_bytes,
)
from jaxpipe.model.llama.config import LlamaConfig
from jaxpipe.model.llama.decoder import Decoder
from jaxpipe.partition.devices import OneDevice
from jaxpipe.pipeline import POLICIES, split_layer

BATCH, LENGTH = 3, 16
GROUPED = {"n_heads": 4, "n_kv_heads": 2}
SHAPES = [GROUPED, {"n_heads": 4, "n_kv_heads": 4}, {"n_heads": 4, "n_kv_heads": 1}]


def model_of(**sizes):
    plain = {"n_layers": 2, "d_model": 24, "head_dim": 8, "d_ff": 40, "vocab_size": 64}
    return LlamaConfig(**(plain | GROUPED | sizes))


def split_of(model, dtype, remat, batch=BATCH, length=LENGTH, slices=1):
    decoder = Decoder(model, slices=slices)
    params = jax.eval_shape(lambda: decoder.init_layer(jax.random.key(0), 0))
    x = jax.ShapeDtypeStruct((batch, length // slices, model.d_model), dtype)
    ids = jax.ShapeDtypeStruct((batch, length // slices), "int32")
    microbatch = {"inputs": ids, "targets": ids}
    if slices > 1:
        microbatch["slice"] = jax.ShapeDtypeStruct((batch,), "int32")
        x = (x, jax.eval_shape(lambda x: decoder.state(x, microbatch), x))
    split = split_layer(decoder.layer, params, x, microbatch, POLICIES[remat])
    return split, params, x, microbatch


def stored(split):
    kinds = (*split.residuals, split.stash)
    return LayerBytes(
        *(sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in kind) for kind in kinds)
    )


def computed(split, params, x, microbatch):
    residuals, dy = split.residuals, x
    return OpFlops(
        F=dot_flops(lambda p, x: split.forward(p, x, microbatch), params, x),
        B=dot_flops(lambda p, *a: split.backward_input(p, microbatch, *a), params, residuals, dy),
        W=dot_flops(
            lambda p, *a: split.backward_weight(p, microbatch, *a),
            params,
            residuals.for_w,
            split.stash,
        ),
    )


CASES = list(product(POLICIES, ["float32", "bfloat16", "float16"], [False, True]))


@pytest.mark.parametrize(("remat", "dtype", "qk_norm"), CASES)
@pytest.mark.parametrize("heads", SHAPES, ids=["grouped", "own", "shared"])
def test_bytes_and_flops(remat, dtype, qk_norm, heads):
    model = model_of(qk_norm=qk_norm, **heads)
    split, *arguments = split_of(model, dtype, remat)
    sizes = {"batch": BATCH, "seq_len": LENGTH, "remat": remat}
    itemsize = jnp.dtype(dtype).itemsize
    assert layer_bytes(model, itemsize=itemsize, **sizes) == stored(split)
    assert layer_flops(model, **sizes) == computed(split, *arguments)


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize(("length", "share"), [(256, 3 / 4), (258, 3 / 4), (257, 1)])
def test_bytes_and_flops_of_blocks_of_queries(remat, length, share):
    """Long sequences: a block of queries makes and stores no scores of later keys."""
    model = model_of()
    split, *arguments = split_of(model, "float32", remat, length=length)
    sizes = {"batch": BATCH, "seq_len": length}
    assert layer_bytes(model, itemsize=4, remat=remat, **sizes) == stored(split)
    assert layer_flops(model, remat=remat, **sizes) == computed(split, *arguments)
    square = layer_flops(model_of(attention="cudnn"), **sizes).F
    left_out = (1 - share) * 4 * BATCH * length**2 * 4 * 8
    assert square - left_out == layer_flops(model, **sizes).F


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("remat", "dtype"), list(product(POLICIES, ["float32", "bfloat16"])))
def test_bytes_and_flops_of_slices(remat, dtype, qk_norm):
    """Keys and values are in the state, which B is given instead of residuals."""
    model, itemsize = model_of(qk_norm=qk_norm), jnp.dtype(dtype).itemsize
    split, params, x, microbatch = split_of(model, dtype, remat, slices=4)
    sizes = {"batch": BATCH, "seq_len": LENGTH}
    cut = sizes | {"slices": 4, "remat": remat}
    assert layer_bytes(model, itemsize=itemsize, **cut) == stored(split)
    assert state_bytes(model, itemsize=itemsize, **sizes) == sum(
        prod(leaf.shape) * leaf.dtype.itemsize for leaf in x[1]
    )
    want = layer_flops(model, **cut)
    assert dot_flops(lambda p, x: split.forward(p, x, microbatch), params, x) == want.F
    of_b = dot_flops(
        lambda p, kept, dy, state: split.backward_input(p, microbatch, kept, dy, state),
        params, split.residuals, x, x[1],
    )  # fmt: skip
    assert of_b == want.B


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize(
    ("sizes", "batch", "length"), [({}, 1, 16), ({}, 2, 1), ({"head_dim": 2, "d_ff": 7}, 1, 3)]
)
def test_bytes_of_odd_sizes(remat, sizes, batch, length):
    model = model_of(**sizes)
    split, *_ = split_of(model, "bfloat16", remat, batch, length)
    got = layer_bytes(model, batch=batch, seq_len=length, itemsize=2, remat=remat)
    assert got == stored(split)


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_bytes_of_fused_attention(remat, qk_norm, monkeypatch):
    """Only tracing: the checks for a GPU and its library are the one thing put aside."""
    fused = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{fused}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{fused}.check_compute_capability", lambda _: True)
    model = model_of(qk_norm=qk_norm, attention="cudnn", head_dim=64)
    split, *_ = split_of(model, "bfloat16", remat, length=128)
    got = layer_bytes(model, batch=BATCH, seq_len=128, itemsize=2, remat=remat)
    assert got == stored(split)


def test_flops_of_fused_attention():
    """B of the fused attention has five products, and nothing of it is computed again outside."""
    sizes = {"batch": BATCH, "seq_len": LENGTH}
    plain, fused = model_of(), model_of(attention="cudnn")
    score = 2 * BATCH * LENGTH**2 * 4 * 8
    none = layer_flops(plain, **sizes)
    assert layer_flops(fused, **sizes) == none + OpFlops(B=score)
    assert layer_flops(fused, remat="selective", **sizes) == none + OpFlops(B=score)
    again = layer_flops(plain, remat="full", **sizes)
    assert layer_flops(fused, remat="full", **sizes) == again + OpFlops(B=score)


def test_causal_attention_counts_the_pairs_that_the_mask_lets_through():
    model = model_of()
    full = layer_flops(model, batch=BATCH, seq_len=LENGTH)
    half = layer_flops(model, batch=BATCH, seq_len=LENGTH, causal=True)
    masked = BATCH * sum(LENGTH - 1 - i for i in range(LENGTH))
    left_out = 2 * 2 * masked * 4 * 8
    assert half + OpFlops(F=left_out, B=2 * left_out) == full


def test_head_flops():
    model = model_of()
    decoder = Decoder(model)
    ends = jax.eval_shape(lambda: decoder.init_ends(jax.random.key(0)))
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, model.d_model), "float32")
    microbatch = {"targets": jnp.zeros((BATCH, LENGTH), "int32")}

    def head(ends, x):
        return decoder.head(ends, x, microbatch)

    work = head_flops(model, batch=BATCH, seq_len=LENGTH)
    assert dot_flops(head, ends, x) == work.F
    assert dot_flops(jax.grad(head, argnums=1), ends, x) == work.F + work.B
    assert dot_flops(jax.grad(head, argnums=(0, 1)), ends, x) == work.F + work.B + work.W
    assert head_flops(model, batch=BATCH, seq_len=LENGTH, tp=2).F == work.F / 2


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_leaves_are_those_of_the_decoder(qk_norm, tied, tp):
    model = model_of(qk_norm=qk_norm, tie_embeddings=tied)
    decoder = Decoder(model, OneDevice(size=tp))
    key = jax.random.key(0)
    made = {
        "layer": jax.eval_shape(lambda: decoder.init_layer(key, 0)),
        "shared": jax.eval_shape(lambda: decoder.init_ends(key)),
    }

    def flat(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {"/".join(key.key for key in path): leaf for path, leaf in leaves}

    for part, leaves in (("layer", layer_leaves(model, tp)), ("shared", end_leaves(model))):
        shapes, cuts = flat(made[part]), flat(decoder.cuts[part])
        assert {name: shape for name, (shape, _) in leaves.items()} == {
            name: leaf.shape for name, leaf in shapes.items()
        }
        assert {name: cut.axis for name, (_, cut) in leaves.items()} == {
            name: cut.axis for name, cut in cuts.items()
        }
    total = lambda leaves: sum(prod(shape) for shape, _ in leaves.values())  # noqa: E731
    ends = total(end_leaves(model))
    assert model.n_layers * total(layer_leaves(model)) + ends == model.parameter_count()


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("attention", ["xla", "cudnn"])
def test_tensor_parallelism_splits_heads_and_hidden_values(remat, attention):
    """One device of two computes a layer of half the heads and hidden values."""
    sizes = {"batch": BATCH, "seq_len": LENGTH, "remat": remat}
    model = model_of(attention=attention, qk_norm=True)
    half = model_of(attention=attention, qk_norm=True, n_heads=2, n_kv_heads=1, d_ff=20)
    assert layer_bytes(model, itemsize=2, tp=2, **sizes) == layer_bytes(half, itemsize=2, **sizes)
    assert layer_flops(model, tp=2, **sizes) == layer_flops(half, **sizes)


@pytest.mark.parametrize("remat", POLICIES)
def test_sequence_parallelism_splits_everything(remat):
    sizes = {"batch": BATCH, "seq_len": LENGTH, "itemsize": 2}
    model = model_of(qk_norm=True)
    whole = layer_bytes(model, remat=remat, **sizes)
    part = layer_bytes(model, remat=remat, tp=2, sequence_parallel=True, **sizes)
    assert (2 * part.for_b, 2 * part.for_w, 2 * part.stash) == (
        whole.for_b,
        whole.for_w,
        whole.stash,
    )
    assert whole.until_b == whole.for_b + whole.for_w
    assert whole.until_w == whole.for_w + whole.stash
    assert hidden_bytes(model, **sizes) == BATCH * LENGTH * 24 * 2
    assert hidden_bytes(model, tp=2, **sizes) == BATCH * LENGTH * 24 * 2
    assert hidden_bytes(model, tp=2, sequence_parallel=True, **sizes) == BATCH * LENGTH * 24


@pytest.mark.parametrize("remat", POLICIES)
def test_devices_that_share_sequences_have_equal_parts_of_the_work(remat):
    sizes = {"batch": BATCH, "seq_len": LENGTH, "sdp": 2}
    model, whole = model_of(qk_norm=True), {"batch": BATCH, "seq_len": LENGTH}
    part = layer_flops(model, remat=remat, **sizes)
    assert part + part == layer_flops(model, remat=remat, **whole)
    part = layer_flops(model, causal=True, **sizes)
    assert part + part == layer_flops(model, causal=True, **whole)
    part = head_flops(model, **sizes)
    assert part + part == head_flops(model, **whole)
    part, all_of_it = (layer_bytes(model, itemsize=2, remat=remat, **s) for s in (sizes, whole))
    assert (2 * part.for_b, 2 * part.for_w, 2 * part.stash) == (
        all_of_it.for_b,
        all_of_it.for_w,
        all_of_it.stash,
    )
    assert 2 * hidden_bytes(model, itemsize=2, **sizes) == hidden_bytes(model, itemsize=2, **whole)


def test_what_cannot_be_is_refused():
    model, sizes = model_of(), {"batch": 1, "seq_len": 5}
    with pytest.raises(ValueError, match="sdp x slices=2 must divide seq_len=5"):
        layer_flops(model, sdp=2, **sizes)
    with pytest.raises(ValueError, match="tp=3 must divide n_heads=4"):
        layer_flops(model, tp=3, **sizes)
    with pytest.raises(ValueError, match="tp=3 must divide vocab_size=64"):
        head_flops(model, tp=3, **sizes)
    with pytest.raises(ValueError, match="tp=2 must divide seq_len=5"):
        hidden_bytes(model, itemsize=2, tp=2, sequence_parallel=True, **sizes)
    with pytest.raises(ValueError, match="unknown remat='dots': use one of none"):
        layer_bytes(model, itemsize=2, remat="dots", **sizes)
