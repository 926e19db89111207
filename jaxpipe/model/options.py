"""What a decoder is built with besides its sizes: how it is shared, its operations, its loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxpipe.core.contract.devices import ONE_DEVICE, OneDevice
from jaxpipe.core.contract.experts import ALL_EXPERTS, AllExperts
from jaxpipe.core.contract.parameter import TP, ParamSpec
from jaxpipe.core.contract.sequence import FULL_SEQUENCE, FullSequence
from jaxpipe.model.attention.causal import CausalAttention
from jaxpipe.model.decoder_config import DecoderConfig
from jaxpipe.model.layers.fp8 import PLAIN, Precision
from jaxpipe.model.objective import Objective


@dataclass(frozen=True)
class Sharing:
    """How devices share a model and its sequences.

    Attributes:
      devices: the devices that share each layer.
      embed_head_devices: the devices that share embedding and head; None: `devices`.
      sequence: context parallelism: how attention reaches the tokens on other devices.
      slices: number of sequence slices, which a device computes one after the other.
      replicas: the replicas, or devices of several replicas, over which the experts of a layer are
        sharded.
    """

    devices: OneDevice = ONE_DEVICE
    embed_head_devices: OneDevice | None = None
    sequence: FullSequence = FULL_SEQUENCE
    slices: int = 1
    replicas: AllExperts = ALL_EXPERTS

    @property
    def width_devices(self) -> OneDevice:
        """The devices that share the width of every routed expert, and route the same tokens."""
        return ONE_DEVICE if self.replicas.over_tp else self.devices

    @property
    def token_devices(self) -> OneDevice:
        """The devices that share a layer, but route different tokens to whole experts."""
        return self.devices if self.replicas.over_tp else ONE_DEVICE


@dataclass(frozen=True)
class Ops:
    """The operations that layers compute with, besides their own maths.

    Attributes:
      precision: precision of the products with the layers' weights.
      dispatch: `(config, replicas)` to the `Dispatch` that brings tokens to experts; None:
        `moe.layer.choose_dispatch`.
      records_routes: whether layers return the chosen experts as `routes`, in the form that a
        replay reads.
      documents: most documents in a packed row, within which attention stays; 0: a row is one text.
      seed: of dropout.
    """

    precision: Precision = PLAIN
    dispatch: Callable[..., Any] | None = None
    records_routes: bool = False
    documents: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Loss:
    """The loss of a batch.

    Attributes:
      chunks: sequence chunks, of which only one chunk's logits are live at a time.
      z_loss: coefficient of the z-loss; if it is not 0, the head returns two losses.
      objective: the loss of the targets' log-probabilities; None: cross-entropy.
    """

    chunks: int = 1
    z_loss: float = 0.0
    objective: Objective | None = None


UNSHARED, PLAIN_OPS, CROSS_ENTROPY = Sharing(), Ops(), Loss()


class LayerParts(NamedTuple):
    """What a layer is built with besides its sizes, exchangeable without editing the layer.

    A layer keeps only what it uses: adapters have a `precision` that holds arrays.
    """

    sharing: Sharing = UNSHARED
    ops: Ops = PLAIN_OPS

    @property
    def devices(self) -> OneDevice:
        """The devices that share the layer."""
        return self.sharing.devices

    def attention(self, config: DecoderConfig) -> CausalAttention:
        """The attention of the layer, limited to the model's window."""
        sequence, documents = self.sharing.sequence, self.ops.documents
        return CausalAttention(sequence, config.attention, config.window, documents)

    def cut(self, dim: int) -> ParamSpec:
        """The spec of a parameter that is sharded over the devices along `dim`."""
        return ParamSpec(sharded=((TP, dim),))

    def own(self, *, differs: bool) -> ParamSpec:
        """The spec of a replicated parameter; if its use `differs`, gradients are partial.

        A use differs where each device applies the parameter to its own heads or tokens; partial
        gradients are summed over tp.
        """
        return ParamSpec(partial_grad_axes=(TP,) if differs else ())
