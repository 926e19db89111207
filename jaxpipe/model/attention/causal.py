"""Causal softmax attention with grouped key/value heads, as a layer calls it.

Shapes: B examples, L queries, S keys, H query heads, G key/value heads, K head dim.
"""

from dataclasses import dataclass

import jax

from jaxpipe.core.contract import Aux, LayerOutput
from jaxpipe.core.contract.sequence import FULL_SEQUENCE, FullSequence
from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.attention.fused import CudnnKernel
from jaxpipe.model.attention.kernel import Kernel, Queries
from jaxpipe.model.attention.keys import Cache, Keys
from jaxpipe.model.attention.plain import XlaKernel
from jaxpipe.model.layers.parts import NO_INPUTS, LayerInputs

KERNELS: dict[str, Kernel] = {"xla": XlaKernel(), "cudnn": CudnnKernel()}  # by `model.attention`


@dataclass(frozen=True)
class CausalAttention:
    """Causal attention as a layer calls it: which keys a query attends to, and the kernel.

    Attributes:
      sequence: how attention reaches the tokens on other devices (context parallelism).
      kernel: name of the kernel, as in `KERNELS`.
      window: number of last tokens that a query attends to, its own included; 0: all.
      documents: most documents in a packed row; 0: a row is one text.
    """

    sequence: FullSequence = FULL_SEQUENCE
    kernel: str = "xla"
    window: int = 0
    documents: int = 0

    def __call__(
        self, q_BLHK: jax.Array, keys: Keys, given: LayerInputs = NO_INPUTS
    ) -> tuple[jax.Array, Cache | None]:
        """Return the attention output `[B, L, H, K]` and, with slices, the updated cache.

        Args:
          q_BLHK: queries of the L tokens of this device's sequence shard, or of its shard of the
            current slice.
          keys: of the same tokens. Values, and the output, may be narrower than keys.
          given: the cache of earlier slices, the documents of packed rows, and what is dropped.

        Raises:
          ValueError: the kernel does not support the case.
        """
        sequence, kernel, (cache, masks, documents, _) = self.sequence, KERNELS[self.kernel], given
        case = AttentionCase(
            sequence,
            slices=cache is not None,
            window=self.window,
            documents=0 if documents is None else self.documents,
            has_sinks=keys.sink_H is not None,
            dropout=masks.dropout.shares,
        )
        if unmet := kernel.supports(case):
            raise ValueError(unmet)
        q_BLHK = sequence.to_heads(q_BLHK)
        keys, cache = keys.reach(case, cache)
        if documents is not None:
            documents = jax.tree.map(sequence.gather_group, documents)
        begin, sequence = 0 if cache is None else cache.begin, sequence.after_exchange
        queries = Queries(q_BLHK, begin, documents, masks.on_shares)
        mixed_BLHK = kernel.attend(case._replace(sequence=sequence), queries, keys)
        return self.sequence.to_tokens(mixed_BLHK), cache


def append_cache(y: jax.Array, cache: Cache | None, aux: Aux = Aux()) -> LayerOutput:  # noqa: B008
    """Return y, the cache up to the end of the slice (if there are slices) and `aux`."""
    return LayerOutput(y, cache and cache.parts, aux)
