"""Sizes and settings of a mixture of experts, and the rules between them."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from msgspec import Meta
from msgspec.structs import fields, replace

from jaxpipe.model.decoder_config import DecoderConfig, PositiveFloat
from jaxpipe.model.family import Count, Positive
from jaxpipe.model.variant import LLAMA, Variant

DENSE, SPARSE = "layer", "sparse"  # the layer kinds
GROUPED = "+"  # joins the kinds of the blocks of a layer that has several
NotNegative = Annotated[float, Meta(ge=0)]
RouterScore = Literal["softmax", "sigmoid", "sqrtsoftplus"]


def is_sparse(kind: str) -> bool:
    """Whether layers of a kind have experts: a family may put more before `SPARSE`."""
    return kind.endswith(SPARSE)


class MixtureConfig(DecoderConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]` of a decoder in which some or all layers have experts in the place of the MLP."""

    n_experts: Count = 0  # routed experts per sparse layer; 0: all layers are dense
    experts_per_token: Positive = 1  # routed experts that each token is sent to
    d_expert: Count = 0  # hidden width of an expert; 0: d_ff
    shared_experts: Count = 0  # experts of the same width that take every token; 0: none
    first_dense_layers: Count = 0  # layers at the start that keep an MLP of width d_ff
    moe_every: Positive = 1  # one layer in this many is sparse, after the first dense ones; 1: all
    router_score: RouterScore = "softmax"  # score of an expert for a token
    norm_topk_prob: bool = True  # normalise a token's weights to a sum of 1, before router_scale
    router_scale: PositiveFloat = 1.0  # factor on the weights
    expert_groups: Positive = 1  # equal groups of consecutive experts; 1: no groups
    groups_per_token: Positive = 1  # number of best groups within which a token chooses its experts
    group_score_experts: Positive = 2  # a group's score is the sum of this many of its best scores
    # weight of the load-balancing loss, which is 1 for even loads: its mean over the routed tokens,
    # also those without a target, summed over sparse layers; 0: none
    router_aux_loss: NotNegative = 0.0
    # weight of log(Z)^2 of the router's softmax, averaged and summed like router_aux_loss; 0: none
    router_z_loss: NotNegative = 0.0
    # change per step of each expert's bias towards even loads; the bias affects which experts are
    # chosen, not their weights; 0: no bias, unless router_bias is set
    router_bias_rate: NotNegative = 0.0
    router_bias: bool = False  # keep such a bias, fixed, if router_bias_rate is 0
    # what the rate multiplies: the sign of an expert's load error, or the error over the mean load
    router_bias_step: Literal["sign", "error"] = "sign"
    # slots per expert in training, as a multiple of the mean load; 0: dropless, like evaluations
    capacity_factor: NotNegative = 0.0

    VARIANT: ClassVar[Variant] = LLAMA  # what the architecture alone decides

    def resolved(self) -> Self:
        """The same model with the widths of a head and of an expert filled in."""
        return replace(super().resolved(), d_expert=self.expert_width if self.n_experts else 0)

    def for_evaluation(self) -> Self:
        """The same model without a capacity of experts."""
        return replace(self, capacity_factor=0.0)

    @property
    def expert_width(self) -> int:
        """Hidden width of an expert."""
        return self.d_expert or self.d_ff

    @property
    def routed_experts(self) -> int:
        """Number of experts that the router of a sparse layer chooses from."""
        return self.n_experts

    @property
    def has_router_bias(self) -> bool:
        """Whether the choice of experts has a bias."""
        return self.router_bias or self.router_bias_rate > 0

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer.

        Layer i, counted from 0, is sparse if i + 1 is a multiple of `moe_every` and i is at least
        `first_dense_layers` (`decoder_sparse_step` of Qwen3-MoE, `first_k_dense_replace` of
        DeepSeek-V3).

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
    def block_kinds(self) -> tuple[str, ...]:
        """The kind of every block of attention and MLP, or experts, in all layers."""
        return tuple(block for kind in self.layer_kinds for block in kind.split(GROUPED))

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the blocks that have experts."""
        return tuple(i for i, kind in enumerate(self.block_kinds) if is_sparse(kind))

    def variable_layers(self, name: str) -> tuple[int, ...]:
        """Indices of the layers that an entry of the first dim of a variable belongs to, each."""
        return self.sparse_layers

    def product_sizes(self, tp: int) -> dict[str, int]:
        """Sizes of a layer's products on one of `tp` devices, by the settings that give them.

        Routed experts count only with a capacity: grouped products are in 8-bit floats only where
        their sizes allow it (`jaxpipe.model.layers.moe.products`).
        """
        width, shared = self.expert_width // tp, {}
        if self.shared_experts:
            name = "model.shared_experts x model.d_expert / parallel.tp"
            shared[name] = self.shared_experts * width
        routed = {"model.d_expert / parallel.tp": width} if self.capacity_factor else {}
        return super().product_sizes(tp) | shared | routed

    def parameter_count(self) -> int:
        """Number of parameters, from the sizes alone."""
        return self._parameters(self.n_experts)

    def active_parameter_count(self) -> int:
        """Number of parameters per token: of routed experts only the chosen ones count."""
        return self._parameters(self.experts_per_token if self.n_experts else 0)

    def _parameters(self, experts: int) -> int:
        """Number of parameters, counting `experts` routed experts per sparse layer."""
        raise NotImplementedError

    def mlp_parameters(self, experts: int) -> int:
        """Count the parameters of all MLPs and routers, with `experts` routed experts per layer."""
        sparse = len(self.sparse_layers)
        dense = 3 * self.d_model * self.d_ff * (self.blocks - sparse)
        width = self.expert_width * (experts + self.shared_experts)
        gates = self.n_experts + bool(self.shared_experts and self.VARIANT.has_shared_gate)
        return dense + sparse * self.d_model * (3 * width + gates)

    def mlp_vectors(self, experts: int) -> int:
        """Count the biases of routers and experts, with `experts` routed experts per layer."""
        if not self.VARIANT.has_expert_biases:
            return 0
        of_expert = 2 * self.expert_width + self.d_model
        return len(self.sparse_layers) * (self.n_experts + experts * of_expert)

    def broken_mixture_rules(self, tp: int) -> Iterator[str]:
        """Yield a sentence for every rule that the sizes of the mixture break.

        `model.experts_per_token` must be at most `model.n_experts`.

        `model.norm_topk_prob` needs `model.experts_per_token` above 1.

        `model.d_expert` must be a multiple of `parallel.tp`.

        `model.expert_groups` must divide `model.n_experts`, and be at least
        `model.groups_per_token`.

        `model.experts_per_token` must be at most the experts of `model.groups_per_token` groups.

        `model.first_dense_layers` and `model.moe_every` must leave a layer for experts, if there
        are experts.
        """
        if not self.n_experts:
            yield from self._unread()
            return
        experts, each, groups = self.n_experts, self.experts_per_token, self.expert_groups
        if each > experts:
            yield (
                f"model.experts_per_token={each} exceeds model.n_experts={experts}: a token goes "
                f"to different experts; change one of them."
            )
        if each == 1 and self.norm_topk_prob:
            yield (
                "model.norm_topk_prob=true with model.experts_per_token=1 gives every token's only "
                "expert the weight 1, whatever the router computes, so the router would not learn: "
                "set model.norm_topk_prob=false, or raise model.experts_per_token."
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
        """Yield a sentence for every setting of experts that a model without experts ignores.

        `model.n_experts` must be above 0 for any other setting of experts.
        """
        for field in fields(MixtureConfig):
            value = getattr(self, field.name)
            if field.name not in DecoderConfig.__struct_fields__ and value != field.default:
                yield (
                    f"model.{field.name}={value!r} is of experts, but model.n_experts=0: set "
                    f"model.n_experts, or leave it out."
                )
