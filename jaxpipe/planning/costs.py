"""What layers, ends and messages cost one device: traced from the model itself, not by formula."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING, NamedTuple

from jaxpipe.config import Config, DataConfig, ParallelConfig, TrainConfig
from jaxpipe.partition.leaf import Leaf

if TYPE_CHECKING:
    import jax


class Parameter(NamedTuple):
    """One parameter: its whole shape, and how devices share it."""

    shape: tuple[int, ...]
    leaf: Leaf


@dataclass(frozen=True)
class LayerCosts:
    """One layer of a kind, and one microbatch or slice of it, on one device.

    FLOPs are those of matrix products, two for every multiply-add. The papers' M_B are the bytes
    of `for_b` and `for_w`, M_W those of `for_w` and `stash`.

    Attributes:
      F, B, W: FLOPs, with what B computes again. BW does both.
      in_fp8: those of F, B and W that are of 8-bit floats.
      waits: shapes and dtypes of the values that wait: residuals that only B reads (`for_b`), those
        that W reads (`for_w`), and what B leaves for W (`stash`).
      state: bytes that slices of a sequence leave for each other; the gradient at them is as large.
      exchanged: bytes that a device sends in all-to-alls over ep, in each of F, B and W.
      shared: bytes that it sends to those that share its sequences, in each.
      turned: those of them that go round a ring.
    """

    F: float
    B: float
    W: float
    in_fp8: Mapping[str, float]
    waits: Mapping[str, tuple["jax.ShapeDtypeStruct", ...]]
    state: int
    parameters: tuple[Parameter, ...]
    exchanged: Mapping[str, float]
    shared: Mapping[str, float]
    turned: Mapping[str, float]

    @property
    def for_b(self) -> int:
        """Bytes that wait for B alone."""
        return size_of(self.waits["for_b"])

    @property
    def for_w(self) -> int:
        """Bytes that F leaves for W."""
        return size_of(self.waits["for_w"])

    @property
    def stash(self) -> int:
        """Bytes that B leaves for W."""
        return size_of(self.waits["stash"])


def size_of(values: Iterable["jax.ShapeDtypeStruct"]) -> int:
    """Bytes of arrays of such shapes and dtypes."""
    return sum(prod(value.shape) * value.dtype.itemsize for value in values)


@dataclass(frozen=True)
class ModelCosts:
    """A model under one configuration.

    Attributes:
      kinds: the costs of each kind of layer.
      order: the kind of every layer.
      head: FLOPs of the loss of a microbatch with all its gradients.
      message: bytes of the activations between two layers, or of their gradient.
      ends: the parameters that no layer has.
    """

    kinds: Mapping[str, LayerCosts]
    order: tuple[str, ...]
    head: float
    message: int
    ends: tuple[Parameter, ...]


_traced: dict[Config, ModelCosts] = {}


def costs_of(config: Config) -> ModelCosts:
    """The costs of a configuration's model; what they do not depend on is not traced again.

    This imports jax, but touches no device.
    """
    key = essentials(config)
    if key not in _traced:
        from jaxpipe.planning.trace import trace

        _traced[key] = trace(key)
    return _traced[key]


def take_traced(known: Mapping[Config, ModelCosts]) -> None:
    """Costs by their `essentials`, which another process has traced."""
    _traced.update(known)


def essentials(config: Config) -> Config:
    """What the ops of a device depend on, and nothing else."""
    parallel, train, documents = config.parallel, config.train, config.data.documents
    packed = {"packing": "sequential", "max_documents": documents} if documents else {}
    return Config(
        model=config.model,
        data=DataConfig(**packed),
        parallel=ParallelConfig(
            pp=parallel.ends_shared_by or 1,
            dp=lcm(parallel.cp, parallel.ep),
            cp=parallel.cp,
            cp_method=parallel.cp_method,
            cp_heads=parallel.cp_heads,
            ep=parallel.ep,
            ep_buffer_factor=parallel.ep_buffer_factor,
            tp=parallel.tp,
            slices=parallel.slices,
            sequence_parallel=parallel.sequence_parallel,
            vocab_parallel_pp=bool(parallel.ends_shared_by),
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
            variable_length=config.marks_padding,
        ),
    )
