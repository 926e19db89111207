"""Costs of layers, embed_head and messages on one device, traced from the model's functions."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from jaxpipe.config import Config, DataConfig, ParallelConfig, TrainConfig
from jaxpipe.planning.cost.kernels import Operations

if TYPE_CHECKING:
    import jax

    from jaxpipe.core.mesh import StageLayout
    from jaxpipe.planning.cost.liveness import WorkingSet


ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class Parameters(NamedTuple):
    """Named parameters: a tree of their full float32 shapes, and the same tree of their specs."""

    shapes: Any
    specs: Any

    @property
    def n_arrays(self) -> int:
        """Number of arrays."""
        import jax

        return len(jax.tree.leaves(self.shapes))


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a layer of one kind for one microbatch or sequence slice, on one device.

    FLOPs are those of matrix products, two per multiply-add. The papers' M_B is the bytes of
    `for_b` and `for_w`, their M_W the bytes of `for_w` and `stash`.

    Attributes:
      kernels: of F, B, W and BW, with what B recomputes, and of R, a recomputation ahead of B,
        which B and BW then leave out.
      waits: shapes and dtypes of the values that stay live: residuals that only B reads (`for_b`),
        residuals that W reads (`for_w`), what R reads (`for_r`), and the W stash (`stash`).
      state: bytes that sequence slices leave for each other; their gradient is as large.
      parameters: the parameters of the layer.
      exchanged: bytes that a device sends in all-to-alls over ep, in each of F, B, W and R.
      spread: the bytes of `exchanged` that stay in a host (`parallel.ep_per_host`).
      shared: bytes that a device sends to replicas that share its sequences (cp), in each.
      turned: the bytes of `shared` that go round the ring of ring attention.
      tensor: bytes that a device sends to devices that share its layers (tp), in each.
      calls: number of collectives of `exchanged`, `shared` and `tensor`, by these names, in each.
      working: what F, B, W, BW and R hold beside parameters and stored values.
    """

    kernels: Mapping[str, Operations]
    waits: Mapping[str, tuple["jax.ShapeDtypeStruct", ...]]
    state: int
    parameters: Parameters
    exchanged: Mapping[str, float]
    spread: Mapping[str, float]
    shared: Mapping[str, float]
    turned: Mapping[str, float]
    tensor: Mapping[str, float]
    calls: Mapping[str, Mapping[str, float]]
    working: Mapping[str, "WorkingSet"]

    @property
    def F(self) -> float:
        """FLOPs of F."""
        return self.kernels["F"].flops()

    @property
    def B(self) -> float:
        """FLOPs of B, with what it recomputes."""
        return self.kernels["B"].flops()

    @property
    def W(self) -> float:
        """FLOPs of W."""
        return self.kernels["W"].flops()

    @property
    def R(self) -> float:
        """FLOPs of R."""
        return self.kernels["R"].flops()

    @property
    def for_b(self) -> int:
        """Bytes of the residuals that only B reads."""
        return size_of(self.waits["for_b"])

    @property
    def for_w(self) -> int:
        """Bytes of the residuals that W reads."""
        return size_of(self.waits["for_w"])

    @property
    def for_r(self) -> int:
        """Bytes of what F stores for R; 0: there is no R."""
        return size_of(self.waits["for_r"])

    @property
    def stash(self) -> int:
        """Bytes of the W stash, which B leaves for W."""
        return size_of(self.waits["stash"])


def size_of(values: Iterable["jax.ShapeDtypeStruct"]) -> int:
    """Bytes of arrays of these shapes and dtypes."""
    return sum(prod(value.shape) * value.dtype.itemsize for value in values)


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model under one configuration.

    Attributes:
      kinds: the costs of each layer kind.
      order: the kind of every layer.
      head: kernels of the loss of a microbatch or slice with all its gradients.
      head_bytes: bytes that it holds at once beside its inputs.
      message: bytes of the activations between two layers, or of their gradient.
      embed_head: the parameters of embedding, final norm and head.
      reads: the layer kinds that read these parameters (`LayerKind.reads`).
    """

    kinds: Mapping[str, LayerCosts]
    order: tuple[str, ...]
    head: Operations
    head_bytes: int
    message: int
    embed_head: Parameters
    reads: frozenset[str] = frozenset()

    def mean(self, of: Callable[[LayerCosts], float]) -> float:
        """Mean of a number over the model's layers."""
        return self.mean_of({name: of(kind) for name, kind in self.kinds.items()})

    def mean_of(self, by_kind: Mapping[str, float]) -> float:
        """Mean over the model's layers of a number that is given by kind."""
        counts = self._counts
        return sum(count * by_kind[name] for name, count in counts.items()) / len(self.order)

    @cached_property
    def _counts(self) -> Counter[str]:
        return Counter(self.order)


_traced: dict[Config, ModelCosts] = {}
_last: list[Any] = [None, None]  # the last configuration, and its costs: most calls repeat it
_layers: dict[Config, ModelCosts] = {}  # by what layers depend on
_embed_heads: dict[Config, ModelCosts] = {}  # by what embedding and head depend on


def costs_of(config: Config) -> ModelCosts:
    """Return the costs of a configuration's model, cached by its `essentials`.

    Layers, and embedding and head, are traced once for all configurations in which they are equal.
    This imports jax, but touches no device.
    """
    if config is _last[0]:
        return _last[1]
    key = essentials(config)
    if key not in _traced:
        from jaxpipe.planning.cost.trace import trace

        of_layers, of_embed_head = _essentials_of_layers(key), _essentials_of_embed_head(key)
        layers, embed_head = _layers.get(of_layers), _embed_heads.get(of_embed_head)
        if layers and embed_head and not layers.reads:
            _traced[key] = replace(
                embed_head, kinds=layers.kinds, order=layers.order, reads=layers.reads
            )
        else:
            _traced[key] = trace(key, layers=layers, embed_head=embed_head)
        _layers.setdefault(of_layers, _traced[key])
        _embed_heads.setdefault(of_embed_head, _traced[key])
    _last[:] = config, _traced[key]
    return _traced[key]


def _essentials_of_layers(essential: Config) -> Config:
    """The settings that layers depend on which do not read embedding and head."""
    parallel = structs.replace(essential.parallel, pp=1, vocab_parallel_pp=False)
    return structs.replace(essential, parallel=parallel)


def _essentials_of_embed_head(essential: Config) -> Config:
    """The settings that embedding and head depend on."""
    parallel = essential.parallel
    alone = ParallelConfig(
        pp=parallel.pp,
        dp=parallel.cp,
        cp=parallel.cp,
        tp=parallel.tp,
        slices=parallel.slices,
        sequence_parallel=parallel.sequence_parallel,
        overlap_halves=essential.halves == "sequence",
        vocab_parallel_pp=parallel.vocab_parallel_pp,
    )
    train = structs.replace(essential.train, remat="none")
    return structs.replace(essential, parallel=alone, train=train)


def recomputing(config: Config) -> Config:
    """The configuration in which B recomputes all layers, as the first `train.remat_layers`."""
    train = structs.replace(config.train, remat="full", remat_layers=0)
    return structs.replace(config, train=train)


def ring_costs(config: Config, layout: "StageLayout") -> list[LayerCosts]:
    """The costs of the layers of every ring slot (`StageLayout.ring_slot_kinds`)."""
    first, kinds = layout.first_ring_slots(config.train.remat_layers), costs_of(config).kinds
    of_first = costs_of(recomputing(config)).kinds if first else kinds
    return [
        (of_first if ring in first else kinds)[kind]
        for ring, kind in enumerate(layout.ring_slot_kinds)
    ]


def essentials(config: Config) -> Config:
    """Reduce a configuration to the settings that the ops of a device depend on."""
    parallel, train, documents = config.parallel, config.train, config.data.documents
    data = DataConfig(packing="sequential", max_documents=documents) if documents else DataConfig()
    return Config(
        model=config.model,
        lora=structs.replace(config.lora, adapter=""),
        data=data,
        parallel=ParallelConfig(
            pp=parallel.vocab_shared_by or 1,
            dp=lcm(parallel.cp, parallel.ep_replicas),
            cp=parallel.cp,
            cp_method=parallel.cp_method,
            cp_heads=parallel.cp_heads,
            ep=parallel.ep,
            ep_over_tp=parallel.ep_over_tp,
            ep_per_host=parallel.ep_per_host,
            ep_buffer_factor=parallel.ep_buffer_factor,
            tp=parallel.tp,
            slices=parallel.slices,
            sequence_parallel=parallel.sequence_parallel,
            overlap_halves=parallel.overlap_halves,
            vocab_parallel_pp=bool(parallel.vocab_shared_by),
        ),
        train=TrainConfig(
            steps=1,
            grad_accum_steps=1,
            microbatch_size=train.microbatch_size,
            seq_len=train.seq_len,
            compute_dtype=train.compute_dtype,
            fp8=train.fp8,
            remat=train.remat,
            loss_chunks=train.loss_chunks,
            loss=train.loss,
            loss_rows=train.loss_rows,
            loss_temperature=train.loss_temperature,
            variable_length=config.marks_padding,
        ),
    )
