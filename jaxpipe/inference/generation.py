"""Generation of tokens: with a cache of keys and values on one device or over tp, else without.

The cache is the state that layers hand from one sequence slice to the next (`LayerKind.state`), in
a model that is built with as many slices as the cache has tokens. Slices of one token generate,
and a prompt is read in slices whose lengths are powers of two, longest first, so that each starts
at a multiple of its length.

Shapes: B prompts, L tokens of a slice, S tokens of the cache, D model, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from msgspec import structs

from jaxpipe.config import ConfigError
from jaxpipe.core.contract import Context, LayerKind
from jaxpipe.core.executor.parameters import DeviceParameters
from jaxpipe.core.mesh import PP, REPLICA_AXES, TP
from jaxpipe.inference.loaded_model import LoadedModel
from jaxpipe.inference.sampling import GREEDY, Draw, Sampling, key_of
from jaxpipe.inference.settings import evaluation_config, uses_pipeline
from jaxpipe.inference.uncached import UncachedDecoding, UncachedModel
from jaxpipe.planning.model import model_of
from jaxpipe.runtime import position
from jaxpipe.training.state import State
from jaxpipe.training.state_checks import check_parameters
from jaxpipe.training.trainer import Trainer

Tree = Any
IsFinished = Callable[[int, list[int]], bool]  # (number of the prompt, its new tokens)
_PER_DEVICE = PartitionSpec((PP, *REPLICA_AXES, TP))  # a leading axis with an entry per device
_SHORTEST = 16  # shortest slice of a prompt [tokens]; what is left is read token by token
_ROUNDING = 64  # caches have a multiple of it [tokens], for fewer programs
_ANY_LENGTH = 2**20  # tokens of a sequence of a model without a longest


class Completion(NamedTuple):
    """The new tokens of a prompt, and the log-probability of each (`Sampling.draw`), float32."""

    tokens: list[int]
    logprobs: np.ndarray


@dataclass(frozen=True, eq=False)
class Generator:
    """Continues prompts; its compiled programs are kept.

    On one device, or over tp, it caches keys and values; on other meshes it does not
    (`uncached.py`). No token is dropped.

    Attributes:
      loaded: the model on its mesh.
      sampling: how tokens are drawn.
    """

    loaded: LoadedModel
    sampling: Sampling = GREEDY

    @classmethod
    def of_trainer(cls, trainer: Trainer, sampling: Sampling = GREEDY) -> Self:
        """The generator of a trainer's states, on its mesh, whatever its loss; see `generate`."""
        config = trainer.config
        config = evaluation_config(config, config.model.max_seq_len or _ANY_LENGTH)
        trainer = replace(trainer, plan=replace(trainer.plan, config=config))
        return cls(LoadedModel(None, trainer, None, None), sampling)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | Sequence[int],
        is_finished: IsFinished = lambda number, tokens: False,
        *,
        seed: int = 0,
        state: State | None = None,
    ) -> list[Completion]:
        """Return the completion of every prompt.

        Args:
          prompts: token ids, at least one each; lengths may differ.
          max_tokens: the most new tokens of a prompt, or of each.
          is_finished: called after every new token; true where the prompt needs no more, such as
            after a token or a text that ends it.
          seed: of the draws, which are the same for the same seed and prompts.
          state: of the trainer, whose parameters are used as in a held-out loss
            (`Trainer.averaged`); None: those of `loaded`.

        Raises `ConfigError` for prompts that the model cannot read or continue.
        """
        loaded = self.loaded
        params, variables = loaded.params, loaded.variables
        if state is not None:
            loaded.trainer.check_state(state)
            params, variables = loaded.trainer.averaged(state), state.variables
        rows = [_as_ids(number, prompt) for number, prompt in enumerate(_listed(prompts))]
        limits = _limits(max_tokens, len(rows))
        lengths = [len(row) for row in rows]
        self._check(rows, limits)
        if params is None:
            raise ConfigError("there are no parameters: give generate(..., state=) a state.")
        check_parameters(params, variables, loaded.trainer.state_shapes)
        most = max(map(sum, zip(lengths, limits.tolist())))
        tokens = np.zeros((len(rows), most + 1), np.int32)
        for into, ids in zip(tokens, rows):
            into[: len(ids)] = ids
        decoding = self._decoding(len(rows), most, params, variables, key_of(seed))
        begin = decoding.read(tokens, min(lengths) - 1)
        made: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        running = {row for row, limit in enumerate(limits) if limit}
        for place in range(begin, most):
            if not running:
                break
            for row, (token, logprob) in enumerate(zip(*decoding.next(tokens, place))):
                if place + 1 < lengths[row]:
                    continue
                tokens[row, place + 1] = token
                if row in running:
                    made[row].append(int(token))
                    logprobs[row].append(logprob)
                    if len(made[row]) == limits[row] or is_finished(row, made[row]):
                        running.remove(row)
        return [Completion(one, np.array(of, np.float32)) for one, of in zip(made, logprobs)]

    def _check(self, prompts: Sequence[np.ndarray], limits: np.ndarray) -> None:
        model = self.loaded.trainer.config.model
        if not prompts:
            raise ConfigError("there is no prompt: give at least one.")
        for number, (prompt, limit) in enumerate(zip(prompts, limits.tolist())):
            if not len(prompt):
                raise ConfigError(f"prompt {number} has no token: give at least one.")
            least, most = prompt.min(), prompt.max()
            if least < 0 or most >= model.vocab_size:
                raise ConfigError(
                    f"prompt {number} has the ids {least} to {most}, but tokens are 0 to "
                    f"{model.vocab_size - 1} with model.vocab_size={model.vocab_size}."
                )
            if limit < 0 or (model.max_seq_len and len(prompt) + limit > model.max_seq_len):
                raise ConfigError(
                    f"prompt {number} has {len(prompt)} tokens and max_tokens={limit}, but the "
                    f"model is made for model.max_seq_len={model.max_seq_len} (0: any): shorten it."
                )

    def _decoding(
        self, prompts: int, tokens: int, params: Tree, variables: Tree, key: np.ndarray
    ) -> "_CachedDecoding | UncachedDecoding":
        """Return the decoding of `prompts` prompts, with up to `tokens` tokens each."""
        if uses_pipeline(self.loaded.trainer.config):
            return UncachedDecoding(self._uncached, params, variables, key)
        cached = self.cached_model(-(-tokens // _ROUNDING) * _ROUNDING)
        return _CachedDecoding(cached, params, variables, key, cached.empty_cache(prompts))

    @cached_property
    def _uncached(self) -> UncachedModel:
        return UncachedModel(self.loaded.trainer, self.sampling)

    def cached_model(self, tokens: int) -> "CachedModel":
        """The compiled programs with a cache of `tokens` tokens."""
        new = CachedModel(self.loaded.trainer, self.sampling, tokens)
        return self._by_tokens.setdefault(tokens, new)

    @cached_property
    def _by_tokens(self) -> dict[int, "CachedModel"]:
        return {}


def _listed(prompts: Any) -> list[Any]:
    """The prompts, one by one; raises `ConfigError` where they are none."""
    if isinstance(prompts, str) or not hasattr(prompts, "__iter__"):
        raise ConfigError(f"prompts are a {type(prompts).__name__}: give a list of lists of ids.")
    return list(prompts)


def _as_ids(number: int, prompt: Any) -> np.ndarray:
    """The ids of a prompt; raises `ConfigError` where they are no integers."""
    try:
        ids = np.asarray(prompt)
    except ValueError as error:
        raise ConfigError(f"prompt {number} is no list of token ids: {error}.") from error
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ConfigError(
            f"prompt {number} is {ids.dtype}{list(ids.shape)}: give a list of token ids, which are "
            f"integers; jaxpipe.inference.text.tokenizer_of encodes text."
        )
    return ids


def _limits(max_tokens: Any, prompts: int) -> np.ndarray:
    """The most new tokens of every prompt; raises `ConfigError` where there are others."""
    limits = np.asarray(max_tokens)
    if limits.shape not in ((), (prompts,)) or not np.issubdtype(limits.dtype, np.integer):
        raise ConfigError(
            f"max_tokens={max_tokens!r}: give one integer, or one for each of {prompts} prompts."
        )
    return np.broadcast_to(limits, prompts)


@dataclass
class _CachedDecoding:
    """Decoding with a cache, which grows with every token read."""

    model: "CachedModel"
    params: Tree
    variables: Tree
    key: np.ndarray
    cache: Tree

    def read(self, tokens_NS: np.ndarray, count: int) -> int:
        begin = 0
        for length in _slices(count):
            position.enter("score")
            part = tokens_NS[:, begin : begin + length]
            self.cache = self.model.read(self.params, self.variables, self.cache, part, begin)
            begin += length
        return begin

    def next(self, tokens_NS: np.ndarray, place: int) -> tuple[np.ndarray, np.ndarray]:
        position.enter("score")
        here = tokens_NS[:, place : place + 1]
        (tokens, logprobs), self.cache = self.model.next(
            self.params, self.variables, self.cache, here, place, self.key
        )
        return np.asarray(tokens), np.asarray(logprobs)


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
      trainer: of the model.
      sampling: how tokens are drawn.
      tokens: S.
    """

    trainer: Trainer
    sampling: Sampling
    tokens: int

    @cached_property
    def model(self) -> Any:
        """The model with a slice for every token of the cache."""
        trainer = self.trainer
        config = structs.replace(
            trainer.config,
            model=trainer.config.model.for_generation(),
            parallel=structs.replace(trainer.config.parallel, slices=self.tokens),
        )
        return model_of(config, trainer.grouped)

    @property
    def _kinds(self) -> list[LayerKind]:
        """The kind of every layer."""
        functions = self.model.functions
        order = functions.layer_kinds(self.trainer.config.model.pipeline_layers)
        return [functions.kinds_by_name[name] for name in order]

    def empty_cache(self, batch: int) -> Tree:
        """The cache before the first token, by layer; leaves have a leading axis of devices."""
        trainer, kinds = self.trainer, self._kinds
        x = jnp.zeros((batch, 1, trainer.config.model.d_model), trainer.execution.compute_dtype)
        rows = {"inputs": jnp.zeros((batch, 1), jnp.int32)}

        def empty() -> Tree:
            states = [kind.state(x, rows) for kind in kinds if kind.state]  # slices give all one
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
        """Compiled `(params, variables, cache, tokens [B, 1], place, key) -> (Draw, cache)`."""
        size = self.trainer.config.model.vocab_size

        def draw(*arguments: Any) -> tuple[Draw, Tree]:
            *read, place, key = arguments
            logits_BV, cache = self._forward(*read, place)
            return self.sampling.draw(logits_BV[:, :size], key, place), cache

        return self._compiled(draw)

    def _compiled(self, function: Callable[..., Any]) -> Any:
        options = self.trainer.compiler_options
        return jax.jit(function, donate_argnums=2, compiler_options=options)

    @property
    def _forward(self) -> Callable[..., tuple[jax.Array, Tree]]:
        """`(params, variables, cache, tokens [B, L], begin) -> (logits [B, V], cache)`."""
        trainer, replicated = self.trainer, PartitionSpec()
        specs = trainer.sharding.partition_specs(trainer.state_shapes.params)
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
        trainer, functions = self.trainer, self.model.functions
        own = DeviceParameters.gather(
            params, trainer.sharding.param_shardings(params), trainer.execution,
            for_layers=any(kind.reads for kind in self._kinds),
        )  # fmt: skip
        batch, length = tokens_BL.shape
        rows = {"inputs": tokens_BL, "slice": jnp.full((batch,), begin // length, jnp.int32)}
        x_BLD, after = functions.embed(own.embed_head, rows), []
        for index, (kind, state) in enumerate(zip(self._kinds, cache)):
            before = jax.tree.map(lambda leaf: leaf[0], state)
            context = Context(rows, jnp.int32(index), before, variables, own.embed_head_of_layers)
            run, (_, *row) = trainer.layout.place_of(index)
            layer = own.layers[run]
            if row:
                layer = jax.tree.map(lambda leaf, row=row[0]: leaf[row], layer)
            x_BLD, state, _ = kind.layer(layer, x_BLD, context)
            after.append(jax.tree.map(lambda leaf: leaf[None], state))
        return self.model.logits(own.embed_head, x_BLD[:, -1:])[:, 0], after
