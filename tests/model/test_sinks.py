"""Attention sinks by every kernel, against one more column of scores differentiated by jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from oracles import fused, ragged
from oracles.attention import attention_ref

from jaxpipe.config import ConfigError, from_builtins
from jaxpipe.core.contract.sequence import FULL_SEQUENCE
from jaxpipe.model import PRESETS
from jaxpipe.model.attention.blocks import KeyBlock, KeyRange, QueryBlock
from jaxpipe.model.attention.causal import CausalAttention
from jaxpipe.model.attention.keys import Cache, Keys
from jaxpipe.model.kernels.cudnn_packed import RowDocuments
from jaxpipe.model.layers.parts import LayerInputs
from jaxpipe.planning.rules.across import check_settings

B, L, H, G, K = 2, 16, 4, 2, 8
LENGTHS = ((5, 9, 2), (16,))
SEGMENTS = jnp.array([np.repeat(np.arange(len(row)), row) for row in LENGTHS], jnp.int32)
POSITIONS = jnp.array([np.concatenate([*map(np.arange, row)]) for row in LENGTHS], jnp.int32)
CASES = {
    "plain": ("xla", 0, False, 1),
    "plain, window": ("xla", 3, False, 1),
    "plain, documents": ("xla", 3, True, 1),
    "blocks of slices": ("xla", 0, False, 2),
    "blocks of slices, window, documents": ("xla", 3, True, 2),
    "cuDNN": ("cudnn", 0, False, 1),
    "cuDNN, window": ("cudnn", 3, False, 1),
    "cuDNN, slices": ("cudnn", 0, False, 2),
    "cuDNN, window, documents": ("cudnn", 3, True, 1),
}


def operands(dtype=jnp.float64):
    shapes = [(B, L, H, K), (B, L, G, K), (B, L, G, K), (H,), (B, L, H, K)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]


def made(attention):
    """Return the output, and the gradients of queries, keys, values and sinks."""
    *given, weight = operands()
    mixed, pull = jax.vjp(attention, *given)
    return mixed, pull(weight)


@pytest.mark.parametrize("case", CASES)
def test_a_sink_is_a_column_of_scores_that_is_dropped(case, monkeypatch):
    fused.stands_in(monkeypatch)
    ragged.stands_in(monkeypatch)
    kernel, window, packed, slices = CASES[case]
    attend = CausalAttention(FULL_SEQUENCE, kernel, window, documents=3 * packed)

    def attention(q, k, v, sinks):
        own, ys = L // slices, []
        past = Cache((jnp.zeros_like(k), jnp.zeros_like(v)), 0) if slices > 1 else None
        for begin in range(0, L, own):
            part = slice(begin, begin + own)
            rows = RowDocuments(SEGMENTS[:, part], POSITIONS[:, part]) if packed else None
            past = past and past._replace(begin=jnp.int32(begin))
            keys = Keys((k[:, part], v[:, part]), sink_H=sinks)
            y, past = attend(q[:, part], keys, LayerInputs(past, documents=rows))
            ys.append(y)
        return jnp.concatenate(ys, 1)

    def reference(q, k, v, sinks):
        key_range = KeyRange.of(np.arange(L), B, window, POSITIONS if packed else None)
        return attention_ref(QueryBlock(q, key_range), KeyBlock(k, v, key_range.own_BL), sinks)

    with jax.enable_x64(True):
        assert_same(jax.jit(lambda: made(attention))(), made(reference))


def test_a_kernel_without_masks_has_no_sinks_where_it_needs_one():
    attend = CausalAttention(FULL_SEQUENCE, "cudnn", window=3)
    q, k, v, sinks, _ = operands(jnp.float32)
    past = Cache((jnp.zeros_like(k), jnp.zeros_like(v)), 0)
    with pytest.raises(ValueError, match="has no log-sum-exp for the attention sinks"):
        attend(q[:, :8], Keys((k[:, :8], v[:, :8]), sink_H=sinks), LayerInputs(past))


FUSED = PRESETS["gpt_oss_20b"] | {"attention": "cudnn"}
SHORT = {"steps": 1, "microbatch_size": 1, "grad_accum_steps": 2, "compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"slices": 2}, "parallel.slices with model.sliding_window=128 masks keys"),
        ({"dp": 2, "cp": 2, "cp_method": "gather"}, "parallel.cp_method='gather' masks keys"),
        ({"dp": 2, "cp": 2, "cp_method": "ring"}, "with a window of 128 tokens"),
        ({"dp": 2, "cp": 2, "cp_method": "ulysses"}, None),
    ],
)
def test_a_configuration_without_these_masks_is_accepted(parallel, message):
    config = from_builtins(
        {"model": FUSED, "train": SHORT | {"seq_len": 256}, "parallel": parallel}
    )
    if message is None:
        check_settings(config)
        return
    with pytest.raises(ConfigError, match=message):
        check_settings(config)
