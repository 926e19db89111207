"""What the kernels of attention say that they do not compute, to configurations and to layers."""

import jax.numpy as jnp
import pytest

from jaxpipe.core.contract.sequence import FullSequence
from jaxpipe.model.attention.case import SUPPORTS, AttentionCase
from jaxpipe.model.attention.causal import KERNELS, CausalAttention
from jaxpipe.model.attention.keys import Keys
from jaxpipe.model.kernels.cudnn_packed import RowDocuments
from jaxpipe.model.layers.parts import LayerInputs

GATHER, RING, ULYSSES = FullSequence(2), FullSequence(2, 1), FullSequence(2, 2)


@pytest.mark.parametrize(
    ("kernel", "case", "words"),
    [
        ("xla", AttentionCase(GATHER, dropout=0.1, has_sinks=True, documents=3), None),
        ("xla", AttentionCase(RING, window=3, chunk=4, has_sinks=True, slices=True), None),
        ("xla", AttentionCase(ULYSSES, dropout=0.1), "set parallel.cp_method=gather"),
        ("cudnn", AttentionCase(dropout=0.1), "model.attention_dropout=0.1 drops shares"),
        ("cudnn", AttentionCase(chunk=8), "model.attention_chunk=8 masks keys"),
        ("cudnn", AttentionCase(RING, window=3), "with a window of 3 tokens"),
        ("cudnn", AttentionCase(RING, has_sinks=True, slices=True), None),
        ("cudnn", AttentionCase(ULYSSES, window=3, documents=2, has_sinks=True), None),
        ("cudnn", AttentionCase(GATHER, has_sinks=True), "parallel.cp_method='gather' masks keys"),
        ("cudnn", AttentionCase(slices=True, has_sinks=True), None),
        ("cudnn", AttentionCase(slices=True, has_sinks=True, window=3), "or parallel.slices=1"),
        ("cudnn", AttentionCase(platform="gpu", capability=8.0), None),
        ("cudnn", AttentionCase(documents=2, capability=8.0), "compute capability 9.0"),
        ("cudnn", AttentionCase(dtype="bfloat16", width=64), None),
        ("cudnn", AttentionCase(dtype="bfloat16", width=60), "bfloat16 of width 60"),
    ],
)
def test_a_kernel_says_why_it_does_not_compute_a_case(kernel, case, words):
    said = SUPPORTS[kernel](case)
    assert said is None if words is None else words in said
    assert KERNELS[kernel].supports(case) == said


def test_a_layer_is_refused_what_a_configuration_is():
    """Blocks of a ring have no mask, so that documents would see each other."""
    attend = CausalAttention(RING, "cudnn", documents=2)
    x, ids = jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="with data.packing: of keys that go round"):
        attend(x, Keys((x, x)), LayerInputs(documents=RowDocuments(ids, ids)))
