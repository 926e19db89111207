"""What the rest of jaxpipe knows of a family of models: one record, and the form of its members.

Nothing here imports jax: a configuration is read, and a model's sizes are checked, without it.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, Self

import msgspec
from msgspec import Meta

from jaxpipe.model.published import HuggingFace
from jaxpipe.partition.sequence import WholeSequence

if TYPE_CHECKING:
    import jax

    from jaxpipe.contract import StageFunctions

Tree = Any
INT32_MAX = 2**31 - 1  # devices count steps, tokens and sizes in int32
Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Layers = Annotated[int, Meta(ge=1, le=2**16)]  # each is described one by one


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: what every family has. A family's own record adds its sizes and choices."""

    DEFAULT: ClassVar[str] = "llama"

    family: str = DEFAULT  # one of jaxpipe.model.FAMILIES
    preset: str = ""  # fills the fields below; those also given by hand win
    n_layers: Layers
    d_model: Positive  # width of the residual stream
    vocab_size: Positive
    max_seq_len: Count = 0  # longest sequence that it is made for; 0: any

    @property
    def routed_experts(self) -> int:
        """Number of experts among which the router of a layer chooses; 0: there are none."""
        return 0

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return False

    def resolved(self) -> Self:
        """The same with every size filled in that follows from others where it is not given."""
        return self

    def parameter_count(self) -> int:
        """Number of parameters, from the sizes alone."""
        raise NotImplementedError

    def active_parameter_count(self) -> int:
        """Number of parameters that one token goes through: of routed experts those it chooses."""
        return self.parameter_count()

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs that training is said to take a token, by which utilisation is measured."""
        raise NotImplementedError

    def flops_of_documents(self, documents: Mapping[int, int]) -> float:
        """FLOPs of so many documents of each length, in which attention looks no further."""
        return sum(
            length * count * self.flops_per_token(length) for length, count in documents.items()
        )

    def part(self, tp: int) -> Self:
        """A model that has whole what each of `tp` devices has of this one's layers."""
        raise NotImplementedError

    def broken_rules(self, tp: int) -> Iterator[str]:
        """A sentence for every rule that its sizes break, alone or with `parallel.tp`."""
        raise NotImplementedError

    def product_sizes(self, tp: int) -> dict[str, int]:
        """The sizes of a layer's products on one of `tp` devices, by the settings they are of.

        No size at all: its products cannot be made in 8-bit floats.
        """
        return {}

    def unmet_needs(self, platform: str) -> Iterator[str]:
        """A sentence for everything that devices of this `jax.Device.platform` do not have."""
        return iter(())

    def unmet_by_context(
        self, sequence: WholeSequence, *, tp: int, dtype: str, packed: bool
    ) -> Iterator[str]:
        """A sentence for every reason why replicas cannot share a `sequence` as it says.

        Each is one of `tp` devices that share the layers, in `dtype`. `packed`: rows hold
        documents.
        """
        if sequence.heads:
            yield (
                f"replicas that share a sequence reach all of it by parallel.cp_method=gather "
                f"alone in models of the family {self.family!r}: set that, or choose another "
                f"model.family."
            )

    def unmet_by_packing(
        self, capability: float | None, rows: tuple[int, int], *, dtype: str, tp: int
    ) -> Iterator[str]:
        """A sentence for every reason why documents that share a row could not be kept apart.

        `capability` is the GPUs' compute capability; None: there are none, or it is not yet known.
        `rows`: how many a device computes at once, and their tokens, in `dtype`.
        """
        yield (
            f"the documents of a packed row see each other in models of the family "
            f"{self.family!r}: set data.packing=none, or choose another model.family."
        )


class Model(Protocol):
    """A model as functions: what the pipeline runs, and initial values for what it reads."""

    @property
    def functions(self) -> "StageFunctions":
        """The model as pipeline stages see it."""

    def init_ends(self, key: "jax.Array") -> Tree:
        """Float32 values of the leaves that no layer has."""

    def init_layer(self, key: "jax.Array", index: "jax.Array | int", kind: str) -> Tree:
        """Float32 values of layer `index`, which is of that kind.

        They depend on key, index and names alone, whatever the layout.
        """


@dataclass(frozen=True)
class Family:
    """One family of models. What needs jax is named, and imported when it is first used.

    Attributes:
      name: as in `model.family`.
      config: the record of `[model]`.
      presets: published models: the fields of `config` that they have.
      model: "module:name" of what makes a `Model`, called as `build` says.
      huggingface: the module that is its `HuggingFace`; "" where there is none.
    """

    name: str
    config: type[ModelConfig]
    presets: Mapping[str, Mapping[str, Any]]
    model: str
    huggingface: str = ""

    def build(self, config: ModelConfig, **sharing: Any) -> Model:
        """The functions of one model: on one device, or as devices share it.

        `sharing` has any of: `devices` that share the layers and `end_devices` that share the ends,
        if these are others (`OneDevice` or the like); `sequence`, of which replicas have stretches;
        `slices` of it in time; `loss_chunks`, of which the loss is made one by one; the `seed` of
        what is dropped; `z_loss`, a coefficient, with which the head has a second loss of that
        name; the most `documents` of a row that do not see each other, where rows are packed; the
        `replicas` that have `routed_experts` in parts; and the `precision` of layers' products.
        """
        module, name = self.model.split(":")
        make: Callable[..., Model] = getattr(importlib.import_module(module), name)
        return make(config, **sharing)

    @property
    def published(self) -> HuggingFace:
        """How Hugging Face writes it; `LookupError` where that is not known."""
        if not self.huggingface:
            raise LookupError(f"the family {self.name!r} has no form at Hugging Face")
        return importlib.import_module(self.huggingface)  # type: ignore[return-value]
