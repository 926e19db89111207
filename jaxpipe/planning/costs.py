"""What layers, ends and messages cost one device: traced from the model itself, not by formula."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from jaxpipe.config import Config, ParallelConfig, TrainConfig
from jaxpipe.partition.leaf import Leaf


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
      for_b, for_w: bytes of residuals that only B reads, and of those that W reads.
      stash: bytes of what B leaves for W.
      state: bytes that slices of a sequence leave for each other; the gradient at them is as large.
    """

    F: float
    B: float
    W: float
    for_b: int
    for_w: int
    stash: int
    state: int
    parameters: tuple[Parameter, ...]


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


def costs_of(config: Config) -> ModelCosts:
    """The costs of a configuration's model; what they do not depend on is not traced again.

    This imports jax, but touches no device.
    """
    return _traced(essentials(config))


def essentials(config: Config) -> Config:
    """What the ops of a device depend on, and nothing else."""
    parallel, train = config.parallel, config.train
    return Config(
        model=config.model,
        parallel=ParallelConfig(
            pp=parallel.pp if parallel.vocab_parallel_pp else 1,
            dp=parallel.sdp,
            sdp=parallel.sdp,
            tp=parallel.tp,
            slices=parallel.slices,
            sequence_parallel=parallel.sequence_parallel,
            vocab_parallel_pp=parallel.vocab_parallel_pp,
        ),
        train=TrainConfig(
            steps=1,
            grad_accum_steps=1,
            microbatch_size=train.microbatch_size,
            seq_len=train.seq_len,
            compute_dtype=train.compute_dtype,
            remat=train.remat,
            loss_chunks=train.loss_chunks,
        ),
    )


@lru_cache(maxsize=64)
def _traced(config: Config) -> ModelCosts:
    from jaxpipe.planning.trace import trace

    return trace(config)
