"""Sizes and choices of a mixture of experts, and the rules between them."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from msgspec import Meta
from msgspec.structs import fields, replace

from jaxpipe.model.decoder_config import DecoderConfig, PositiveFloat
from jaxpipe.model.family import Count, Positive

DENSE, SPARSE = "layer", "sparse"  # the kinds of layers
NotNegative = Annotated[float, Meta(ge=0)]


class MixtureConfig(DecoderConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: what a decoder has of whose layers some or all have experts for an MLP."""

    n_experts: Count = 0  # routed experts of a sparse layer; 0: no layer is sparse
    experts_per_token: Positive = 1  # routed experts that a token goes to
    d_expert: Count = 0  # hidden width of an expert; 0: d_ff
    shared_experts: Count = 0  # of that width, side by side, which every token goes to
    first_dense_layers: Count = 0  # so many have an MLP of d_ff
    moe_every: Positive = 1  # of all layers every so-manieth is sparse, but for those
    router_score: Literal["softmax", "sigmoid"] = "softmax"  # of an expert for a token
    norm_topk_prob: bool = True  # weights of a token's experts add up to 1, times router_scale
    router_scale: PositiveFloat = 1.0  # times the weights
    expert_groups: Positive = 1  # equal groups of neighbouring experts, and ...
    groups_per_token: Positive = 1  # ... in how many of them a token chooses
    # times the loss of uneven loads, 1 where they are even: a mean over the routed tokens, masked
    # ones too, summed over layers
    router_aux_loss: NotNegative = 0.0
    router_z_loss: NotNegative = 0.0  # times log(Z)^2 of the router's softmax, averaged alike
    router_bias_rate: NotNegative = 0.0  # of a bias on the choice that evens loads; 0: no bias
    router_bias_step: Literal["sign", "error"] = "sign"  # what the rate multiplies
    capacity_factor: NotNegative = 0.0  # times the mean load: what an expert takes; 0: everything

    def resolved(self) -> Self:
        """The same with the width of a head and of an expert."""
        return replace(super().resolved(), d_expert=self.expert_width if self.n_experts else 0)

    @property
    def expert_width(self) -> int:
        """Hidden width of an expert."""
        return self.d_expert or self.d_ff

    @property
    def routed_experts(self) -> int:
        """Number of experts among which the router of a layer chooses."""
        return self.n_experts

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer.

        Layer i, counted from 0, is sparse where i + 1 is a multiple of `moe_every`, but for the
        first ones (`decoder_sparse_step` of Qwen3-MoE, `first_k_dense_replace` of DeepSeek-V3).

        >>> sizes = {"d_model": 8, "vocab_size": 8, "n_heads": 1, "d_ff": 8, "n_layers": 6}
        >>> model = MixtureConfig(**sizes, n_experts=4, moe_every=2, first_dense_layers=3)
        >>> model.sparse_layers
        (3, 5)
        """
        every = self.moe_every
        return tuple(
            SPARSE
            if self.n_experts and i >= self.first_dense_layers and (i + 1) % every == 0
            else DENSE
            for i in range(self.n_layers)
        )

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Which layers have experts."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == SPARSE)

    def product_sizes(self, tp: int) -> dict[str, int]:
        """Those of experts too, of which the routed ones are products with a capacity alone."""
        width, shared = self.expert_width // tp, {}
        if self.shared_experts:
            name = "model.shared_experts x model.d_expert / parallel.tp"
            shared[name] = self.shared_experts * width
        routed = {"model.d_expert / parallel.tp": width} if self.capacity_factor else {}
        return super().product_sizes(tp) | shared | routed

    def mlp_parameters(self, experts: int) -> int:
        """Values of all layers' MLPs, of whose routed experts so many are counted."""
        sparse = len(self.sparse_layers)
        dense = 3 * self.d_model * self.d_ff * (self.n_layers - sparse)
        width = self.expert_width * (experts + self.shared_experts)
        return dense + sparse * self.d_model * (3 * width + self.n_experts)

    def broken_mixture_rules(self, tp: int) -> Iterator[str]:
        """A sentence for every rule that the sizes of the mixture break."""
        if not self.n_experts:
            yield from self._unread()
            return
        experts, each, groups = self.n_experts, self.experts_per_token, self.expert_groups
        if each > experts:
            yield (
                f"model.experts_per_token={each} exceeds model.n_experts={experts}: a token goes "
                f"to different experts; change one of them."
            )
        if self.expert_width % tp:
            yield (
                f"model.d_expert={self.expert_width} must be a multiple of parallel.tp={tp}: "
                f"devices that share a layer have equal parts of every expert; change one of them."
            )
        if experts % groups or self.groups_per_token > groups:
            yield (
                f"model.expert_groups={groups} must divide model.n_experts={experts} and be at "
                f"least model.groups_per_token={self.groups_per_token}: groups are equal, and a "
                f"token chooses in some of them; change one of them."
            )
        elif each > experts // groups * self.groups_per_token:
            yield (
                f"model.experts_per_token={each} exceeds the {experts // groups} experts of each "
                f"of model.groups_per_token={self.groups_per_token} groups: raise the latter."
            )
        if not self.sparse_layers:
            yield (
                f"model.n_experts={experts}, but model.first_dense_layers="
                f"{self.first_dense_layers} and model.moe_every={self.moe_every} leave none of "
                f"{self.n_layers} layers sparse: lower them, or leave the experts out."
            )

    def _unread(self) -> Iterator[str]:
        """Settings of experts that a model without any does not read."""
        for field in fields(MixtureConfig):
            value = getattr(self, field.name)
            if field.name not in DecoderConfig.__struct_fields__ and value != field.default:
                yield (
                    f"model.{field.name}={value!r} is of experts, but model.n_experts=0: set "
                    f"model.n_experts, or leave it out."
                )
