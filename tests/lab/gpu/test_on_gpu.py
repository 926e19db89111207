"""Tests that need a GPU: run as `JAX_PLATFORMS=cuda pytest -m gpu tests/lab/gpu`."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import cal_diff
from jax import lax
from oracles.fp8 import emulated

from jaxpipe import config as configs
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.core.contract import Context
from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.core.contract.sequence import FULL_SEQUENCE
from jaxpipe.core.executor.reference import losses_and_gradients_ref
from jaxpipe.lab.bench import train
from jaxpipe.model.attention.blocks import KeyRange, PlainBlocks
from jaxpipe.model.attention.causal import CausalAttention
from jaxpipe.model.attention.keys import Cache, Keys
from jaxpipe.model.attention.ring import RingLayout, ring_attention
from jaxpipe.model.kernels.cudnn_attention import FusedBlocks
from jaxpipe.model.kernels.cudnn_packed import RowDocuments
from jaxpipe.model.kernels.grouped_fp8 import GroupedFp8
from jaxpipe.model.layers.fp8 import E4M3, E5M2, Fp8
from jaxpipe.model.layers.moe.products import multiply_by_kernel
from jaxpipe.model.layers.parts import LayerInputs
from jaxpipe.runtime.programs import compiler
from jaxpipe.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU here"),
]
SIZES = [
    "model.d_model=256", "model.n_heads=4", "model.n_kv_heads=2", "model.d_ff=512",
    "parallel.pp=1", "parallel.dp=1", "train.seq_len=256", "train.microbatch_size=2",
]  # fmt: skip
OPTIONS = compiler.options("gpu") if jax.default_backend() == "gpu" else {}
jit = partial(jax.jit, compiler_options=OPTIONS)
SMALL = Path(__file__).parents[2] / "data" / "small.toml"


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_are_the_references(schedule):
    with jax.default_matmul_precision("highest"):
        trainer = Trainer.resolve(configs.load(SMALL, [*SIZES, f"parallel.schedule={schedule}"]))
        params = trainer.init().params
        ids = np.random.default_rng(0).integers(0, 256, (4, 2, 257), np.int32)
        batch = {"inputs": ids[..., :-1], "targets": ids[..., 1:]}
        losses, got = jit(trainer.pipeline.losses_and_gradients)(params, trainer.put(batch))
        layers = [jax.tree.map(lambda leaf: leaf[0], slot) for slot in params["layers"]]
        wanted, want = losses_and_gradients_ref(
            trainer.pipeline.functions, params["embed_head"], layers, batch
        )
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    got["layers"] = [jax.tree.map(lambda leaf: leaf[0], slot) for slot in got["layers"]]
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert cal_diff(np.asarray(one), np.asarray(other)) < 1e-10


def test_bfloat16_with_the_fused_attention_learns():
    config = configs.load(
        SMALL, [*SIZES, "model.attention=cudnn", "train.compute_dtype=bfloat16", "train.remat=full"]
    )
    found = train.measure(config, steps=3)
    assert found["losses"][1] < found["losses"][0]
    assert found["peak_memory_bytes"] > 4 * found["parameters"]
    assert jnp.isfinite(found["step_seconds"])


def test_moments_on_the_host_take_no_memory_of_the_device(tmp_path):
    """Those of a new state, of a restored one, and after a step."""
    trainer = Trainer.resolve(configs.load(SMALL, [*SIZES, "train.offload_moments=true"]))
    keying = StateKeying(trainer.layout, trainer.sharding)

    def taken(before: int) -> int:
        return jax.devices()[0].memory_stats()["bytes_in_use"] - before

    def check(state):
        jax.block_until_ready(state)
        parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
        assert parameters <= taken(before) < 1.2 * parameters
        jax.tree.map(lambda leaf: leaf.delete(), state)

    ids = np.ones((4, 2, 256), np.int32)
    batch = trainer.put({"inputs": ids, "targets": ids})
    before = taken(0)
    state = trainer.init()
    with CheckpointStore(tmp_path, keep=1, asynchronous=False, keying=keying) as checkpoints:
        checkpoints.save(0, state, {})
        check(state)
        parts, _ = checkpoints.restore(trainer.state_shapes.parts(), say=pytest.fail)
    check(trainer.state_of(parts))
    del parts
    state, metrics = trainer.train_step(trainer.init(), batch)
    with CheckpointStore(tmp_path, keep=1, asynchronous=True, keying=keying) as checkpoints:
        checkpoints.save(1, state, {})
        state, metrics = trainer.train_step(state, batch)  # while it is written
    del metrics
    check(state)


@pytest.mark.parametrize("history", [0, 3], ids=["current", "delayed"])
def test_products_in_8_bits_are_those_of_the_same_values_in_float32(history):
    """Also that cuBLAS computes them: F, B and W each have an 8-bit product."""
    rng = np.random.default_rng(0)
    drawn = (
        rng.normal(size=(2, 64, 128)),
        rng.normal(size=(128, 256)),
        rng.normal(size=(2, 64, 256)),
    )
    x, weight, dy = (jnp.asarray(array, "bfloat16") for array in drawn)
    fp8 = Fp8(history)
    scales = jnp.float32([[[2.0**-6, 2.0**-6, 2.0**-13]]])
    dot = fp8.dot(("up",), ONE_DEVICE, Context({}, jnp.int32(0), None, {"fp8_scale": scales}))

    def run(x, weight, dy):
        (made,), pull = jax.vjp(lambda x, weight: dot(x, up=weight), x, weight)
        return made, *pull((dy,))

    compiled = jit(run).lower(x, weight, dy).compile()
    assert compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    given = scales[0].tolist() if history else None
    (made,), dx, (dweight,) = emulated(*map(np.asarray, (x, [weight], [dy])), given)
    for got, want in zip(compiled(x, weight, dy), (made, dx, dweight), strict=True):
        got = np.asarray(got, np.float32)
        assert np.linalg.norm(got - want) < 5e-3 * np.linalg.norm(want)  # bfloat16: 2e-3


@pytest.mark.parametrize("tokens", [slice(None), slice(256, 512), slice(512, 768)], ids=str)
@pytest.mark.parametrize("window", [0, 100])
def test_the_fused_kernel_keeps_documents_apart(window, tokens):
    """Compared with plain products in bfloat16, on all tokens or a slice of them.

    A row has a document that slice borders cut, one of a single token, and padding.
    """
    lengths = ((200, 300, 1, 511, 12), (1024,), (700, 20), ())
    numbers = [np.repeat(np.arange(len(row)), row) for row in lengths]
    places = [np.concatenate([np.arange(n) for n in row] or [[]]) for row in lengths]
    pad = lambda rows, with_: np.stack(  # noqa: E731
        [np.pad(row, (0, 1024 - len(row)), constant_values=with_) for row in rows]
    ).astype(np.int32)
    of = RowDocuments(jnp.array(pad(numbers, -1)[:, tokens]), jnp.array(pad(places, 0)[:, tokens]))
    keys, shapes = jax.random.split(jax.random.key(0), 3), [(4, 1024, h, 128) for h in (8, 2, 2)]
    q, k, v = (jax.random.normal(*given, "bfloat16") for given in zip(keys, shapes))
    begin, real = jnp.int32(tokens.start or 0), (of.segments >= 0)[..., None, None]
    past = None if tokens == slice(None) else Cache((k, v), begin)

    def loss(given, kernel):
        q, k, v = given
        of_past = past and Cache((k, v), begin)
        attend = CausalAttention(kernel=kernel, window=window, documents=5)
        own = Keys((k[:, tokens], v[:, tokens]))
        mixed, _ = attend(q[:, tokens], own, LayerInputs(of_past, documents=of))
        mixed = jnp.where(real, mixed, 0).astype("float32")
        return jnp.sum(jnp.sin(jnp.arange(mixed.size)).reshape(mixed.shape) * mixed), mixed

    def found(kernel):
        (_, mixed), gradients = jit(
            jax.value_and_grad(lambda given: loss(given, kernel), has_aux=True)
        )((q, k, v))
        return mixed, *gradients

    for fused, plain in zip(found("cudnn"), found("xla"), strict=True):
        assert cal_diff(np.asarray(fused), np.asarray(plain)) < 1e-4


@pytest.mark.parametrize(
    ("widths", "window", "has_sinks"),
    [((192, 128), 0, False), ((64, 64), 0, True), ((64, 64), 128, True), ((128, 128), 100, False)],
    ids=str,
)
def test_the_fused_kernel_has_latent_heads_windows_and_sinks(widths, window, has_sinks):
    """Compared with plain products in bfloat16; heads of DeepSeek (keys wider than values)."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(2, 512, 8, widths[0]), (2, 512, 2, widths[0]), (2, 512, 2, widths[1])]
    operands = [jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes)]
    operands += [jax.random.normal(keys[3], (8,))] if has_sinks else []
    weight = jax.random.normal(keys[4], (2, 512, 8, widths[1]))

    def found(kernel):
        attend = CausalAttention(kernel=kernel, window=window)

        def loss(operands):
            q, k, v, *sinks = operands
            mixed, _ = attend(q, Keys((k, v), sink_H=sinks[0] if sinks else None))
            return jnp.sum(weight * mixed), mixed

        (_, mixed), gradients = jit(jax.value_and_grad(loss, has_aux=True))(operands)
        return mixed, *gradients

    for fused, plain in zip(found("cudnn"), found("xla"), strict=True):
        assert cal_diff(np.asarray(fused), np.asarray(plain)) < 1e-4


@pytest.mark.parametrize("sizes", [(300, 0, 17, 707), (100, 200, 0, 0)], ids=str)
def test_grouped_products_are_ragged_dots(sizes):
    """By tokamax's kernel; in the second case rows are left over, which give zeros."""
    pytest.importorskip("tokamax")
    keys = jax.random.split(jax.random.key(0), 3)
    rows, matrices, weight = (
        jax.random.normal(key, shape, "bfloat16")
        for key, shape in zip(keys, [(1024, 256), (4, 256, 512), (1024, 512)])
    )
    counts = jnp.int32(sizes)

    def found(product):
        made, pull = jax.vjp(lambda rows, matrices: product(rows, matrices, counts), rows, matrices)
        return made, *pull(weight)

    ways = (
        jit(found, static_argnums=0)(product) for product in (multiply_by_kernel, lax.ragged_dot)
    )
    for got, want in zip(*ways, strict=True):
        assert cal_diff(np.asarray(got), np.asarray(want)) < 1e-4


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="no kernel of this jax")
@pytest.mark.parametrize("sizes", [(384, 0, 128, 512), (128, 256, 0, 0)], ids=str)
def test_grouped_products_in_8_bits_are_the_references(sizes):
    """Of random integers, whose sums are exact; in the second case rows are left over."""
    rng, counts, scale = np.random.default_rng(0), jnp.int32(sizes), jnp.float32(2**-8)
    cores = jax.devices()[0].core_count

    def compare(shapes, forms, dtype):
        operands = (
            jnp.asarray(rng.integers(-8, 9, shape), form.dtype)
            for shape, form in zip(shapes, forms, strict=True)
        )
        given = *operands, counts, scale
        got, want = (
            jit(GroupedFp8.multiply, static_argnums=(0, 5))(GroupedFp8(number), *given, dtype)
            for number in (cores, 0)
        )
        np.testing.assert_array_equal(np.asarray(got, "float32"), np.asarray(want, "float32"))

    compare([(1024, 768), (4, 2048, 768)], (E4M3, E4M3), "bfloat16")
    compare([(1024, 2048), (4, 768, 2048)], (E5M2, E4M3), "bfloat16")
    compare([(768, 1024), (2048, 1024)], (E4M3, E5M2), "float32")


@pytest.mark.parametrize("begin", [0, 512])
def test_the_fused_kernels_blocks_are_those_of_plain_products(begin):
    """In bfloat16: own tokens and two slices before them, combined by their logsumexp."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 256, 8, 128), (2, 1024, 2, 128), (2, 1024, 2, 128), (2, 256, 8, 128)]
    *given, weight = (jax.random.normal(*of, "bfloat16") for of in zip(keys, shapes))
    sight = KeyRange.of(begin + np.arange(256), 2, 0, None)

    def found(blocks):
        def attention(q, k, v):
            course = RingLayout(FULL_SEQUENCE, 256, blocks)
            return ring_attention(course, q, k, v, sight, jnp.int32(begin))

        mixed, pull = jax.vjp(attention, *given)
        return mixed, *pull(weight)

    ways = (jit(found, static_argnums=0)(blocks) for blocks in (FusedBlocks(), PlainBlocks(0)))
    for fused, plain in zip(*ways, strict=True):
        assert cal_diff(np.asarray(fused), np.asarray(plain)) < 1e-4
