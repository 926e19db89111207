"""Generation of tokens: with a cache of keys and values on one device or over tp, else without.

The cache is the state that layers hand from one sequence slice to the next (`LayerKind.state`), in
a model that is built with as many slices as the cache has tokens. Slices of one token generate,
and a prompt is read in slices whose lengths are powers of two, longest first, so that each starts
at a multiple of its length.

Shapes: B prompts, L tokens of a slice, S tokens of the cache, D model, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from msgspec import structs

from jaxpipe.contract import Context
from jaxpipe.inference.loaded_model import LoadedModel
from jaxpipe.inference.sampling import GREEDY, Sampling
from jaxpipe.inference.settings import uses_pipeline
from jaxpipe.inference.uncached import UncachedModel
from jaxpipe.parallel import PP, REPLICA_AXES, TP
from jaxpipe.pipeline.parameters import DeviceParameters
from jaxpipe.planning.model import model_of

Tree = Any
IsFinished = Callable[[int, list[int]], bool]  # (number of the prompt, its new tokens)
_PER_DEVICE = PartitionSpec((PP, *REPLICA_AXES, TP))  # a leading axis with an entry per device
_SHORTEST = 16  # shortest slice of a prompt [tokens]; what is left is read token by token
_ROUNDING = 64  # caches have a multiple of it [tokens], for fewer programs


@dataclass(frozen=True, eq=False)
class Generator:
    """Continues prompts; its compiled programs are kept.

    With several pipeline ranks or replicas there is no cache (`uncached.py`).

    Attributes:
      loaded: the model on its mesh.
      sampling: how tokens are drawn.
    """

    loaded: LoadedModel
    sampling: Sampling = GREEDY

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, is_finished: IsFinished
    ) -> list[list[int]]:
        """Return the new tokens of every prompt.

        Args:
          prompts: token ids, at least one each; lengths may differ.
          max_tokens: the most new tokens of a prompt.
          is_finished: called after every new token; true where the prompt needs no more.
        """
        lengths = [len(prompt) for prompt in prompts]
        most = max(lengths) + max_tokens
        tokens = np.zeros((len(prompts), most + 1), np.int32)
        for row, prompt in zip(tokens, prompts):
            row[: len(prompt)] = prompt
        decoding = self._decoding(len(prompts), most)
        begin = decoding.read(tokens, min(lengths) - 1)
        generated: list[list[int]] = [[] for _ in prompts]
        running = set(range(len(prompts))) if max_tokens else set()
        for place in range(begin, most):
            if not running:
                break
            for row, token in enumerate(decoding.next(tokens, place).tolist()):
                if place + 1 < lengths[row]:
                    continue
                tokens[row, place + 1] = token
                if row in running:
                    generated[row].append(token)
                    if len(generated[row]) == max_tokens or is_finished(row, generated[row]):
                        running.remove(row)
        return generated

    def _decoding(self, prompts: int, tokens: int) -> "_CachedDecoding | UncachedModel":
        """Return the decoding of `prompts` prompts, with up to `tokens` tokens each."""
        if uses_pipeline(self.loaded.trainer.config):
            return self._uncached
        cached = self.cached_model(-(-tokens // _ROUNDING) * _ROUNDING)
        return _CachedDecoding(cached, cached.empty_cache(prompts))

    @cached_property
    def _uncached(self) -> UncachedModel:
        return UncachedModel(self.loaded, self.sampling)

    def cached_model(self, tokens: int) -> "CachedModel":
        """The compiled programs with a cache of `tokens` tokens."""
        return self._by_tokens.setdefault(tokens, CachedModel(self.loaded, self.sampling, tokens))

    @cached_property
    def _by_tokens(self) -> dict[int, "CachedModel"]:
        return {}


@dataclass
class _CachedDecoding:
    """Decoding with a cache, which grows with every token read."""

    model: "CachedModel"
    cache: Tree

    def read(self, tokens_NS: np.ndarray, count: int) -> int:
        loaded, begin = self.model.loaded, 0
        for length in _slices(count):
            part = tokens_NS[:, begin : begin + length]
            self.cache = self.model.read(loaded.params, loaded.variables, self.cache, part, begin)
            begin += length
        return begin

    def next(self, tokens_NS: np.ndarray, place: int) -> np.ndarray:
        loaded, here = self.model.loaded, tokens_NS[:, place : place + 1]
        drawn, self.cache = self.model.next(
            loaded.params, loaded.variables, self.cache, here, place
        )
        return np.asarray(drawn)


def _slices(tokens: int) -> Iterator[int]:
    """Lengths of the slices in which the first tokens of a prompt are read.

    >>> list(_slices(100)), list(_slices(15))
    ([64, 32], [])
    """
    for bit in reversed(range(tokens.bit_length())):
        if tokens >> bit & 1 and 1 << bit >= _SHORTEST:
            yield 1 << bit


@dataclass(frozen=True, eq=False)
class CachedModel:
    """The programs of a model with a cache of S tokens.

    Attributes:
      loaded: the model on its mesh.
      sampling: how tokens are drawn.
      tokens: S.
    """

    loaded: LoadedModel
    sampling: Sampling
    tokens: int

    @cached_property
    def model(self) -> Any:
        """The model with a slice for every token of the cache."""
        trainer = self.loaded.trainer
        config = structs.replace(
            trainer.config,
            model=trainer.config.model.for_generation(),
            parallel=structs.replace(trainer.config.parallel, slices=self.tokens),
        )
        return model_of(config, trainer.grouped)

    def empty_cache(self, batch: int) -> Tree:
        """The cache before the first token, by layer; leaves have a leading axis of devices."""
        trainer, functions = self.loaded.trainer, self.model.functions
        x = jnp.zeros((batch, 1, trainer.config.model.d_model), trainer.execution.compute_dtype)
        rows = {"inputs": jnp.zeros((batch, 1), jnp.int32)}

        def empty() -> Tree:
            states = [functions.kinds_by_name[kind].state(x, rows) for kind in trainer.layout.kinds]
            devices = (trainer.mesh.size,)
            return jax.tree.map(lambda leaf: jnp.zeros(devices + leaf.shape, leaf.dtype), states)

        sharding = NamedSharding(trainer.mesh, _PER_DEVICE)
        return jax.jit(empty, out_shardings=sharding)()

    @cached_property
    def read(self) -> Any:
        """Compiled `(params, variables, cache, tokens [B, L], begin) -> cache`."""

        def read(*arguments: Any) -> Tree:
            return self._forward(*arguments)[1]

        return self._compiled(read)

    @cached_property
    def next(self) -> Any:
        """Compiled `(params, variables, cache, tokens [B, 1], place) -> (drawn [B], cache)`."""
        size = self.loaded.trainer.config.model.vocab_size

        def draw(*arguments: Any) -> tuple[jax.Array, Tree]:
            logits_BV, cache = self._forward(*arguments)
            return self.sampling.draw(logits_BV[:, :size], arguments[-1]), cache

        return self._compiled(draw)

    def _compiled(self, function: Callable[..., Any]) -> Any:
        options = self.loaded.trainer.compiler_options
        return jax.jit(function, donate_argnums=2, compiler_options=options)

    @property
    def _forward(self) -> Callable[..., tuple[jax.Array, Tree]]:
        """`(params, variables, cache, tokens [B, L], begin) -> (logits [B, V], cache)`."""
        trainer, replicated = self.loaded.trainer, PartitionSpec()
        specs = trainer.sharding.partition_specs(self.loaded.params)
        return jax.shard_map(
            self._forward_on_device,
            mesh=trainer.mesh,
            in_specs=(specs, replicated, _PER_DEVICE, replicated, replicated),
            out_specs=(PartitionSpec(None, TP), _PER_DEVICE),
            check_vma=False,
        )

    def _forward_on_device(
        self, params: Tree, variables: Tree, cache: Tree, tokens_BL: jax.Array, begin: jax.Array
    ) -> tuple[jax.Array, Tree]:
        """The next token's logits after the last of L tokens, and the cache with all of them."""
        trainer, functions = self.loaded.trainer, self.model.functions
        kinds = functions.kinds_by_name
        own = DeviceParameters.gather(
            params, trainer.sharding.param_shardings(self.loaded.params), trainer.execution,
            for_layers=any(kind.reads for kind in kinds.values()),
        )  # fmt: skip
        batch, length = tokens_BL.shape
        rows = {"inputs": tokens_BL, "slice": jnp.full((batch,), begin // length, jnp.int32)}
        x_BLD, after = functions.embed(own.embed_head, rows), []
        for index, (kind, state) in enumerate(zip(trainer.layout.kinds, cache)):
            before = jax.tree.map(lambda leaf: leaf[0], state)
            context = Context(rows, jnp.int32(index), before, variables, own.embed_head_of_layers)
            run, (_, *row) = trainer.layout.place_of(index)
            layer = own.layers[run]
            if row:
                layer = jax.tree.map(lambda leaf, row=row[0]: leaf[row], layer)
            x_BLD, state, _ = kinds[kind].layer(layer, x_BLD, context)
            after.append(jax.tree.map(lambda leaf: leaf[None], state))
        return self.model.logits(own.embed_head, x_BLD[:, -1:])[:, 0], after
