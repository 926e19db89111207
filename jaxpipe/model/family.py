"""What the rest of jaxpipe knows of a model family: one record, and its members' interfaces.

Nothing here imports jax: configurations are read and model sizes checked without it.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, Self

import msgspec
from msgspec import Meta

from jaxpipe.model.attention.case import AttentionCase
from jaxpipe.model.published import HuggingFace, architecture

if TYPE_CHECKING:
    import jax

    from jaxpipe.core.contract import StageFunctions
    from jaxpipe.model.loss import ScoreOptions, TokenScores

Tree = Any
INT32_MAX = 2**31 - 1  # devices count steps, tokens and sizes in int32
Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Layers = Annotated[int, Meta(ge=1, le=2**16)]  # bounded: layers are listed one by one


class ModelConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, cache_hash=True
):
    """`[model]`: the fields of every family. A family's own class adds its sizes and choices."""

    DEFAULT: ClassVar[str] = "llama"

    family: str = DEFAULT  # one of jaxpipe.model.FAMILIES
    preset: str = ""  # published model that fills the fields below; fields in the file win
    n_layers: Layers
    d_model: Positive  # width of the residual stream
    vocab_size: Positive
    max_seq_len: Count = 0  # longest sequence that the model supports [tokens]; 0: any

    @property
    def routed_experts(self) -> int:
        """Number of experts that a layer's router chooses from; 0: the model has none."""
        return 0

    @property
    def pipeline_layers(self) -> int:
        """Number of layers that pipeline stages are made of."""
        return self.n_layers

    @property
    def tokens_ahead(self) -> int:
        """Number of further tokens that each position predicts in training."""
        return 0

    @property
    def tokens_before(self) -> int:
        """Number of tokens before each that its layers read in `inputs_before_1`, and so on."""
        return 0

    @property
    def shard_multiple(self) -> int:
        """Shards and slices of a sequence must be multiples of it, in tokens."""
        return 1

    @property
    def has_cache(self) -> bool:
        """Whether generation has a cache of earlier tokens; without one it computes them again."""
        return True

    def variable_layers(self, name: str) -> tuple[int, ...]:
        """Indices of the layers that an entry of the first dim of a variable belongs to, each."""
        return ()

    def block_of(self, layer: int, path: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        """Index of the published layer that a parameter of a layer is in, and its path there."""
        return layer, path

    def for_evaluation(self) -> Self:
        """The same model with experts that take every token that chooses them."""
        return self

    def for_inference(self, *, dropless: bool = True) -> Self:
        """The same model without what training alone computes, with attention for every dtype.

        `dropless` False keeps the capacity of experts, to repeat what a training step drops.
        """
        return (self.for_evaluation() if dropless else self).for_generation()

    def for_generation(self) -> Self:
        """The same model with attention that takes tokens one by one, after those before them."""
        return self

    @property
    def tied(self) -> bool:
        """Whether the head is the transposed embedding."""
        return False

    def resolved(self) -> Self:
        """The same configuration with every derived size filled in that is not given."""
        return self

    def parameter_count(self) -> int:
        """Number of parameters, from the sizes alone."""
        raise NotImplementedError

    def active_parameter_count(self) -> int:
        """Number of parameters per token: of routed experts only the chosen ones count."""
        return self.parameter_count()

    def flops_per_token(self, seq_len: int) -> int:
        """Model FLOPs of training per token, from which utilisation (MFU) is computed."""
        raise NotImplementedError

    def frozen_flops(self, lora_rank: int) -> float:
        """FLOPs per token for gradients of weights, which adapters leave out; 0 for rank 0."""
        return self.flops_per_token(0) / 3 if lora_rank else 0.0

    def flops_of_documents(self, documents: Mapping[int, int]) -> float:
        """Model FLOPs of documents, given as counts by length; attention stays in a document."""
        return sum(
            length * count * self.flops_per_token(length) for length, count in documents.items()
        )

    def attention_flops(self, tokens: int) -> float:
        """Model FLOPs of attention within a document, the part that is not linear in its tokens."""
        return tokens * (self.flops_per_token(tokens) - self.flops_per_token(0))

    def part(self, tp: int) -> Self:
        """A model whose full layers have the sizes of one device's shards under `tp`."""
        raise NotImplementedError

    def broken_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes break, alone or with `parallel.tp`."""
        raise NotImplementedError

    def product_sizes(self, tp: int) -> dict[str, int]:
        """Dims of a layer's products on one of `tp` devices, by the settings that set them.

        Empty: the family does not support fp8.
        """
        return {}

    def unmet_by_attention(self, case: AttentionCase, tp: int) -> Iterator[str]:
        """Yield a sentence for every reason why attention cannot be computed as the case asks.

        Args:
          case: of which the model fills in its own part.
          tp: number of devices that share each layer.

        `parallel.cp_method` must be `gather` in families of models that implement no other.

        `data.packing` must be `none` in families of models that cannot keep documents apart.
        """
        if case.sequence.heads:
            yield (
                f"replicas that share a sequence reach all of it by parallel.cp_method=gather "
                f"alone in models of the family {self.family!r}: set that, or choose another "
                f"model.family."
            )
        if case.documents:
            yield (
                f"the documents of a packed row see each other in models of the family "
                f"{self.family!r}: set data.packing=none, or choose another model.family."
            )


class Model(Protocol):
    """A model as functions: what the pipeline runs, and the initial values of its parameters."""

    @property
    def functions(self) -> "StageFunctions":
        """The model as pipeline stages see it."""

    def with_options(self, **options: Mapping[str, Any]) -> Self:
        """The model with other fields of the records that `ModelFamily.build` takes."""

    def init_embed_head(self, key: "jax.Array") -> Tree:
        """Initial float32 values of the parameters that belong to no layer (`embed_head`)."""

    def init_layer(self, key: "jax.Array", index: "jax.Array | int", kind: str) -> Tree:
        """Initial float32 values of layer `index`, which is of that kind.

        They depend on key, index and names alone, whatever the layout.
        """

    def logits(self, embed_head: Tree, x: "jax.Array") -> "jax.Array":
        """Logits `[B, L, V]` of the next tokens; V are this device's shard of the vocabulary."""

    def next_logits(self, embed_head: Tree, x: "jax.Array", rows: Tree) -> "jax.Array":
        """Logits `[B, V]` after the one place in each row whose target counts."""

    def token_scores(
        self, embed_head: Tree, x: "jax.Array", rows: Tree, options: "ScoreOptions" = ...
    ) -> "TokenScores":
        """The scores of a microbatch's targets, as `StageFunctions.outputs` returns them."""


@dataclass(frozen=True)
class ModelFamily:
    """One model family. Modules that need jax are named here, and imported on first use.

    Attributes:
      name: value of `model.family`.
      config: the class of `[model]`.
      presets: published models by name, with the fields of `config` that they fill.
      model: "module:name" of a callable that returns a `Model`, with the arguments of `build`; most
        families are built of Llama's layers.
      huggingface: a module that implements `HuggingFace`, or one whose `FORMATS` do, one for each
        published architecture; "": there is none.
    """

    name: str
    config: type[ModelConfig]
    presets: Mapping[str, Mapping[str, Any]]
    model: str = "jaxpipe.model.families.llama.decoder:LlamaDecoder"
    huggingface: str = ""

    def build(self, config: ModelConfig, **options: Any) -> Model:
        """Return the functions of one model, on one device or as devices share it.

        `options` may have `sharing`, `ops` and `loss`, the records of `jaxpipe.model.options`.
        """
        module, name = self.model.split(":")
        make: Callable[..., Model] = getattr(importlib.import_module(module), name)
        return make(config, **options)

    @property
    def formats(self) -> tuple[HuggingFace, ...]:
        """How Hugging Face stores each architecture of the family; empty if it has none."""
        if not self.huggingface:
            return ()
        module = importlib.import_module(self.huggingface)
        return getattr(module, "FORMATS", (module,))

    def format_named(self, config_json: Mapping[str, Any]) -> HuggingFace:
        """The format of the architecture that a config.json names; raises `ValueError`."""
        known = {name: form for form in self.formats for name in form.ARCHITECTURES}
        return known[architecture(config_json, tuple(known))]

    def format_of(self, model: ModelConfig) -> HuggingFace:
        """The first format that describes a model.

        Raises `ValueError` with a sentence where there is none.
        """
        if not self.formats:
            raise ValueError(
                f"the family {self.name!r} has no form at Hugging Face: it cannot be exported."
            )
        for form in self.formats:
            if form.describes(model):
                return form
        choices = {name: None for form in self.formats for name in form.CHOICES}
        chosen = ", ".join(f"model.{name}={getattr(model, name)!r}" for name in choices)
        raise ValueError(f"{chosen}: transformers has no model with these: it cannot be exported.")
