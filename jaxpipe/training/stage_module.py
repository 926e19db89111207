"""One stage of a configured model as a Flax module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxpipe.core.contract import Context
from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.core.executor.stage import EmbedHeadFunction
from jaxpipe.core.schedule import compute_layer_assignment
from jaxpipe.flax_models import Stage
from jaxpipe.model import FAMILIES, ModelConfig
from jaxpipe.model.decoder import CausalDecoder
from jaxpipe.model.layers.parts import EmbedHeadParts, init_from

Tree = Any


class FunctionModule(nnx.Module):
    """A function of parameters and x as a module, with the parameters under their own names."""

    def __init__(self, function: Callable[[Tree, jax.Array], jax.Array], params: Tree):
        self._function = function
        for name, value in params.items():
            setattr(self, name, nnx.data(jax.tree.map(nnx.Param, value)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the function to the current parameters and x."""
        return self._function(nnx.to_pure_dict(nnx.state(self, nnx.Param)), x)


def build_stage_module(
    config: ModelConfig, pp_rank: int, pp_size: int, key: jax.Array | None = None
) -> Stage:
    """Return the layers of one stage, with the embedding in the first and the head in the last.

    Initial values are those of the trainer with the same key, whatever `pp_size`.

    Args:
      config: the model, `[model]` of a configuration.
      pp_rank: index of the stage.
      pp_size: number of stages.
      key: of the initial values; None: `jax.random.key(0)`.

    Raises:
      ValueError: there are fewer layers than stages, or no such stage; embedding and head are one
        matrix; layers have experts or dropout, or read tokens.

    >>> from jaxpipe.model.families.llama.config import LlamaConfig
    >>> config = LlamaConfig(n_layers=3, d_model=8, vocab_size=16, n_heads=2, n_kv_heads=2, d_ff=16)
    >>> stage = build_stage_module(config, 1, 2)
    >>> list(stage.layers), stage.embed, sorted(nnx.to_pure_dict(nnx.state(stage.head)))
    (['2'], None, ['final_norm', 'head'])
    """
    if not 0 <= pp_rank < pp_size:
        raise ValueError(f"pp_rank={pp_rank} must be from 0 to pp_size - 1 = {pp_size - 1}.")
    if config.tied:
        raise ValueError(
            "the head is the embedding, but in stages they are different modules: untie them "
            "(model.tie_embeddings), or train with train.py, which sums their gradients."
        )
    model = FAMILIES[config.family].build(config)
    assert isinstance(model, CausalDecoder)
    reads_rows = config.tokens_ahead or config.tokens_before or model.dropout
    if config.routed_experts or reads_rows:
        raise ValueError(
            "layers with experts or predictions return losses and counts, look-ups of n-grams read "
            "tokens, and dropout the samples' numbers, for which a module's call has no place: "
            "train this model with train.py."
        )
    key = jax.random.key(0) if key is None else key
    start, end = compute_layer_assignment(config.n_layers, pp_size)[pp_rank]
    order = model.functions.layer_kinds(config.n_layers)
    layers = {
        i: FunctionModule(_Layer(model, order[i]), model.init_layer(key, i, order[i]))
        for i in range(start, end)
    }
    first, last = start == 0, end == config.n_layers
    return Stage(layers, *_embed_head_of(model, key, first=first, last=last))


@dataclass(frozen=True)
class _Layer:
    """A layer as a function; equal for layers of one kind, so that a pipeline traces it once."""

    model: CausalDecoder
    kind: str

    def __call__(self, params: Tree, x: jax.Array) -> jax.Array:
        return self.model.layer(params, x, Context({}, jnp.int32(0)), self.kind).y


def _embed_head_of(
    model: CausalDecoder, key: jax.Array, *, first: bool, last: bool
) -> tuple[FunctionModule | None, FunctionModule | None]:
    """The embedding and the head, where the stage is the first or the last."""
    embed_head, tokens = model.init_embed_head(key), jnp.zeros((1, 1), jnp.int32)
    graph = nnx.graphdef(model.new_embed_head(EmbedHeadParts(ONE_DEVICE), init_from(key)))

    def embed(params: Tree, tokens: jax.Array) -> jax.Array:
        return model.embed(params, {"inputs": tokens})

    def head(params: Tree, x: jax.Array) -> jax.Array:
        normed, matrix = nnx.merge(graph, params).leave(x)
        return normed @ matrix

    x = jax.eval_shape(embed, embed_head, tokens)
    return (
        _with_own_params(embed, embed_head, tokens) if first else None,
        _with_own_params(head, embed_head, x) if last else None,
    )


def _with_own_params(
    function: Callable[[Tree, jax.Array], jax.Array], embed_head: Tree, x: Any
) -> FunctionModule:
    """The function as a module of the parameters that it reads."""
    trained = jax.tree.map(lambda _: True, embed_head)
    used = flatten_dict(EmbedHeadFunction.trace(function, trained, embed_head, x).used)
    flat = flatten_dict(embed_head)
    own = {name: leaf for name, leaf in flat.items() if used[name]}
    unread = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for name, leaf in flat.items()
        if name not in own
    }

    def apply(params: Tree, x: jax.Array) -> jax.Array:
        return function(unflatten_dict(unread | flatten_dict(params)), x)

    return FunctionModule(apply, unflatten_dict(own))
