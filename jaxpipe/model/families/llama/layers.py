"""The layers of a Llama-style decoder in Flax NNX.

Shapes: B examples, L tokens, D model, H query heads, G key/value heads, K head dim, F mlp hidden, V
vocabulary. Where devices share a layer, H, G, F and V count this device's shard, and with sequence
parallelism the stream `[B, L, D]` between sublayers has this device's shard of L; weights have the
shapes that their `ParamSpec`s give them. With context parallelism L is this device's sequence
shard, or its shard of a slice, and S the full sequence. Parameters may be stored in any dtype; a
layer computes in the dtype of its input, norms, rotary angles and the attention's softmax in
float32 (or wider, if the input is).
"""

from collections.abc import Callable

import jax
from flax import nnx

from jaxpipe.core.contract import Aux, Context, LayerOutput
from jaxpipe.core.contract.devices import ONE_DEVICE, OneDevice
from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.model.attention.causal import append_cache
from jaxpipe.model.attention.keys import Cache, Keys
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.kernels.cudnn_packed import RowDocuments
from jaxpipe.model.layers.gated import gated, hidden_products
from jaxpipe.model.layers.hyper_connection import Add, Residual, plain_residual
from jaxpipe.model.layers.moe.config import is_sparse
from jaxpipe.model.layers.moe.layer import MixtureOfExperts
from jaxpipe.model.layers.parts import (
    Dot,
    EmbedHeadParts,
    Init,
    LayerInputs,
    RMSNorm,
    broadcast_last,
    scale,
)
from jaxpipe.model.layers.rope.config import RotaryConfig
from jaxpipe.model.layers.rope.rotate import rotary
from jaxpipe.model.options import LayerParts


class LlamaAttention(nnx.Module):
    """Causal grouped-query attention with rotary positions; q and k may have norms, all biases.

    Devices that share it have complete heads. If there are more devices than key/value heads, each
    has the weights of all key/value heads and uses those of one head. `CausalAttention` reaches the
    keys and values of other sequence shards and of earlier slices.
    """

    NAME = "attn"

    def __init__(self, config: LlamaConfig, parts: LayerParts, init: Init):
        d, k, devices = config.d_model, config.head_size, parts.devices
        out_std = 0.02 / (2 * config.n_layers) ** 0.5
        self.own_kv = config.n_kv_heads % devices.size == 0
        kv = parts.cut(1) if self.own_kv else parts.own(differs=True)
        self.wq = init("attn/wq", (d, config.n_heads * k), 0.02, parts.cut(1))
        self.wk = init("attn/wk", (d, config.n_kv_heads * k), 0.02, kv)
        self.wv = init("attn/wv", (d, config.n_kv_heads * k), 0.02, kv)
        self.wo = init("attn/wo", (config.n_heads * k, d), out_std, parts.cut(0))
        if config.qkv_bias:
            kv = parts.cut(0) if self.own_kv else kv
            self.bq = init("attn/bq", (config.n_heads * k,), 0.0, parts.cut(0))
            self.bk = init("attn/bk", (config.n_kv_heads * k,), 0.0, kv)
            self.bv = init("attn/bv", (config.n_kv_heads * k,), 0.0, kv)
        if config.VARIANT.has_output_gate:
            self.wg = init("attn/wg", (d, config.n_heads * k), 0.02, parts.cut(1))
        if config.VARIANT.has_out_bias:
            self.bo = init("attn/bo", (d,), 0.0, parts.own(differs=devices.sequence))
        if config.VARIANT.has_sinks:
            self.sinks = init("attn/sinks", (config.n_heads,), 0.02, parts.cut(0))
        if config.qk_norm and config.VARIANT.norms_span_heads:
            for name, heads in ("q_norm", config.n_heads), ("k_norm", config.n_kv_heads):
                norm = new_norm(f"attn/{name}", heads * k, config, init, parts.cut(0), devices)
                setattr(self, name, norm)
        elif config.qk_norm:
            norm = parts.own(differs=devices.size > 1)
            self.q_norm = new_norm("attn/q_norm", k, config, init, norm)
            self.k_norm = new_norm("attn/k_norm", k, config, init, norm)
        self.config, self.devices = config, devices
        self.attend = parts.attention(config)

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, given: LayerInputs
    ) -> tuple[jax.Array, Cache | None]:
        """Mix tokens: `[B, L, D] -> [B, L, D]`; the positions are those of all L tokens."""
        config, devices, dot = self.config, self.devices, given.dot
        x_BLD = devices.enter(x_BLD)

        def heads(x_BLX: jax.Array) -> jax.Array:
            return x_BLX.reshape(*x_BLX.shape[:2], -1, config.head_size)

        wk, wv = self._own(self.wk[...]), self._own(self.wv[...])
        products = dot(x_BLD, wq=self.wq[...], wk=wk, wv=wv)
        if config.qkv_bias:
            biases = self.bq[...], self._own(self.bk[...]), self._own(self.bv[...])
            products = (y + broadcast_last(bias, y) for y, bias in zip(products, biases))
        q_BLX, k_BLX, v_BLX = products
        if config.qk_norm and config.VARIANT.norms_span_heads:
            q_BLX, k_BLX = self.q_norm(q_BLX), self.k_norm(k_BLX)
        q_BLHK, k_BLGK, v_BLGK = heads(q_BLX), heads(k_BLX), heads(v_BLX)
        if config.qk_norm and not config.VARIANT.norms_span_heads:
            q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        q_BLHK, k_BLGK = self.place(q_BLHK, k_BLGK, positions_BL)
        given = given._replace(documents=self.limit(given.documents, positions_BL))
        sink_H = self.sinks[...] if config.VARIANT.has_sinks else None
        mixed_BLHK, cache = self.attend(q_BLHK, Keys((k_BLGK, v_BLGK), sink_H=sink_H), given)
        mixed_BLX = mixed_BLHK.reshape(*x_BLD.shape[:2], -1)
        if config.VARIANT.has_output_gate:
            (gate_BLX,) = dot(x_BLD, wg=self.wg[...])
            mixed_BLX = mixed_BLX * jax.nn.sigmoid(gate_BLX)
        (made_BLD,) = dot(mixed_BLX, wo=self.wo[...])
        y_BLD = devices.leave(made_BLD)
        if config.VARIANT.has_out_bias:
            y_BLD = y_BLD + broadcast_last(self.bo[...], y_BLD)
        return y_BLD, cache

    def place(
        self, q_BLHK: jax.Array, k_BLGK: jax.Array, positions_BL: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return queries and keys at their positions, as scores are computed of them."""
        if self.config.has_positions:
            q_BLHK = rotary(q_BLHK, positions_BL, self.config)
            k_BLGK = rotary(k_BLGK, positions_BL, self.config)
        return scale(q_BLHK, self.config.query_factor), k_BLGK

    def limit(self, documents: RowDocuments | None, positions_BL: jax.Array) -> RowDocuments | None:
        """Return the documents within which the tokens attend."""
        return documents

    def _own(self, weight: jax.Array) -> jax.Array:
        """The part of a key or value weight, or bias, for the heads that our queries use."""
        if self.own_kv:
            return weight
        devices = self.devices
        head = devices.index() * self.config.n_kv_heads // devices.size
        k = self.config.head_size
        return jax.lax.dynamic_slice_in_dim(weight, head * k, k, axis=-1)


class LlamaMLP(nnx.Module):
    """An MLP, most often gated: with SwiGLU down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, name: str, width: int, config: RotaryConfig, parts: LayerParts, init: Init):
        d, f = config.d_model, width
        out_std = 0.02 / (2 * config.n_layers) ** 0.5
        self.hidden = tuple(f"w_{one}" for one in hidden_products(config.VARIANT.gate))
        for weight in self.hidden:
            setattr(self, weight, init(f"{name}/{weight}", (d, f), 0.02, parts.cut(1)))
        self.w_down = init(f"{name}/w_down", (f, d), out_std, parts.cut(0))
        self.gate, self.devices = config.VARIANT.gate, parts.devices

    def __call__(self, x_BLD: jax.Array, dot: Dot) -> jax.Array:
        """Transform each token: `[B, L, D] -> [B, L, D]`."""
        return self.devices.leave(self.of_whole(self.devices.enter(x_BLD), dot))

    def of_whole(self, x_BLD: jax.Array, dot: Dot) -> jax.Array:
        """The same for x on which `enter` was called; returns a partial sum for `leave`."""
        products = dot(x_BLD, **{weight: getattr(self, weight)[...] for weight in self.hidden})
        (down_BLD,) = dot(gated(self.gate, *products), w_down=self.w_down[...])
        return down_BLD


class GatedSharedMLP(LlamaMLP):
    """An MLP beside experts, whose output the sigmoid of a product of its input multiplies."""

    def __init__(self, name: str, width: int, config: RotaryConfig, parts: LayerParts, init: Init):
        super().__init__(name, width, config, parts, init)
        leaf = parts.own(differs=parts.devices.size > 1)
        self.share = init(f"{name}/share", (config.d_model, 1), 0.02, leaf)

    def of_whole(self, x_BLD: jax.Array, dot: Dot) -> jax.Array:
        """The same for x on which `enter` was called; returns a partial sum for `leave`."""
        share_BL1 = jax.nn.sigmoid(x_BLD @ self.share[...].astype(x_BLD.dtype))
        return share_BL1 * super().of_whole(x_BLD, dot)


class LlamaLayer(nnx.Module):
    """Attention, or another mixer of tokens, and MLP or experts, each added to the stream.

    What they read has a norm (Llama), what they return (OLMo 2), or both (Gemma 3).
    """

    def __init__(
        self, kind: str, config: RotaryConfig, parts: LayerParts, init: Init,
        mixer: type[nnx.Module] = LlamaAttention,
        experts: Callable[..., nnx.Module] = MixtureOfExperts,
    ):  # fmt: skip
        config = config.of_kind(kind)
        leaf, variant = parts.own(differs=parts.devices.sequence), config.VARIANT

        def norm(name: str, *, exists: bool) -> Callable[[jax.Array], jax.Array]:
            return new_norm(name, config.d_model, config, init, leaf) if exists else _as_it_is

        self.attn_norm = norm("attn_norm", exists=variant.has_pre_norms)
        self.mlp_norm = norm("mlp_norm", exists=variant.has_pre_norms)
        self.attn_post_norm = norm("attn_post_norm", exists=variant.has_post_norms)
        self.mlp_post_norm = norm("mlp_post_norm", exists=variant.has_post_norms)
        self.mixer = mixer.NAME  # parameters of different mixers differ in their paths
        setattr(self, self.mixer, mixer(config, parts, init))
        if is_sparse(kind):
            width = config.shared_experts * config.expert_width
            mlp = GatedSharedMLP if variant.has_shared_gate else LlamaMLP
            shared = mlp("shared", width, config, parts, init) if width else None
            self.moe = experts(config, parts, init, shared)
        else:
            self.mlp = LlamaMLP("mlp", config.d_ff, config, parts, init)
        self.is_sparse = is_sparse(kind)
        self.mixer_residual = self.new_residual("mixer_residual", config, init, leaf)
        self.mlp_residual = self.new_residual("mlp_residual", config, init, leaf)

    def new_residual(
        self, name: str, config: RotaryConfig, init: Init, leaf: ParamSpec
    ) -> Residual:
        """Build the connection by which a sublayer reads the stream and adds to it."""
        return plain_residual

    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, context: Context, given: LayerInputs
    ) -> LayerOutput:
        """`[B, L, D] -> [B, L, D]`, and with slices the state of the mixer after the slice."""
        mix = getattr(self, self.mixer)
        read_BLD, add = self.mixer_residual(x_BLD)
        mixed_BLD, cache = mix(self.attn_norm(read_BLD), positions_BL, given)
        y_BLD, aux = self.after_attention(add, mixed_BLD, context, given)
        return append_cache(y_BLD, cache, aux)

    def after_attention(
        self, add: Add, mixed_BLD: jax.Array, context: Context, given: LayerInputs
    ) -> tuple[jax.Array, Aux]:
        """Add to the stream what attention returned, then the MLP's or the experts' output."""
        x_BLD = add(given.masks.stream(self.attn_post_norm(mixed_BLD), "attention"))
        read_BLD, add = self.mlp_residual(x_BLD)
        normed_BLD, aux = self.mlp_norm(read_BLD), Aux()
        if self.is_sparse:
            made_BLD, aux = self.moe(normed_BLD, context, given.dot)
        else:
            made_BLD = self.mlp(normed_BLD, given.dot)
        made_BLD = self.mlp_post_norm(made_BLD)
        return add(given.masks.stream(made_BLD, "mlp")), aux


def _as_it_is(x_BLD: jax.Array) -> jax.Array:
    """Stands for a norm that the architecture lacks."""
    return x_BLD


def new_norm(
    name: str, size: int, config: RotaryConfig, init: Init, leaf: ParamSpec,
    devices: OneDevice = ONE_DEVICE,
) -> RMSNorm:  # fmt: skip
    """Build a norm of a model: `RMSNorm` with its epsilon and offset."""
    return RMSNorm(name, size, config.norm_eps, init, leaf, config.VARIANT.norm_offset, devices)


class LlamaEmbedHead(nnx.Module):
    """Embedding before the layers, final norm and head after them.

    The vocabulary is sharded over the devices that share them. A tied head is the embedding.
    """

    def __init__(self, config: LlamaConfig, parts: EmbedHeadParts, init: Init):
        d, v = config.d_model, config.vocab_size
        self.embed = init("embed", (v, d), 0.02, parts.cut(0))
        self.final_norm = new_norm("final_norm", d, config, init, parts.own())
        if not config.tied:
            self.head = init("head", (d, v), 0.02, parts.cut(1))
        self.tied, self.parts = config.tied, parts
        self.scale = d**0.5 if config.VARIANT.scales_embedding else 1.0

    def enter(self, tokens_BL: jax.Array) -> jax.Array:
        """Embed tokens: `[B, L] -> [B, L, D]`."""
        x_BLD = self.parts.devices.leave(self.parts.look_up(self.embed[...], tokens_BL))
        return x_BLD if self.scale == 1 else self.scale * x_BLD

    def leave(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the head's operands: `[B, L, D]` of all tokens, and its matrix `[D, V]`."""
        return self.operands(self.final_norm(x_BLD))

    def operands(self, normed_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the head's operands for a stream that is normalised already."""
        x_BLD = self.parts.devices.enter(normed_BLD)
        head_DV = self.embed[...].T if self.tied else self.head[...]
        return x_BLD, head_DV.astype(x_BLD.dtype)
