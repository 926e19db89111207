"""The layers of a GPT-2 in Flax NNX (Radford et al. 2019, in the form of its released code).

Shapes: B examples, L tokens, D model, H heads, K head dim, F mlp hidden, V vocabulary. For L, H, F
and V where devices share a layer or a sequence, and for the dtypes of the computation, see
`jaxpipe.model.families.llama.layers`.
"""

import jax
from flax import nnx

from jaxpipe.model.attention.keys import Cache, Keys
from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.model.layers.parts import (
    Dot,
    EmbedHeadParts,
    Init,
    LayerInputs,
    LayerNorm,
    broadcast_last,
)
from jaxpipe.model.options import LayerParts


class GPT2Attention(nnx.Module):
    """Causal attention in which each head has its own keys and values; heads are sharded."""

    def __init__(self, config: GPT2Config, parts: LayerParts, init: Init):
        d, heads = config.d_model, config.n_heads * config.head_size
        out_std = 0.02 / (2 * config.n_layers) ** 0.5
        self.wq = init("attn/wq", (d, heads), 0.02, parts.cut(1))
        self.wk = init("attn/wk", (d, heads), 0.02, parts.cut(1))
        self.wv = init("attn/wv", (d, heads), 0.02, parts.cut(1))
        self.bq = init("attn/bq", (heads,), 0.0, parts.cut(0))
        self.bk = init("attn/bk", (heads,), 0.0, parts.cut(0))
        self.bv = init("attn/bv", (heads,), 0.0, parts.cut(0))
        self.wo = init("attn/wo", (heads, d), out_std, parts.cut(0))
        self.bo = init("attn/bo", (d,), 0.0, parts.own(differs=parts.devices.sequence))
        self.attend = parts.attention(config)
        self.width, self.devices = config.head_size, parts.devices

    def __call__(self, x_BLD: jax.Array, given: LayerInputs) -> tuple[jax.Array, Cache | None]:
        """Mix tokens: `[B, L, D] -> [B, L, D]`."""
        devices, dot = self.devices, given.dot
        x_BLD = devices.enter(x_BLD)

        def heads(x_BLX: jax.Array, bias: nnx.Param) -> jax.Array:
            x_BLX = x_BLX + broadcast_last(bias[...], x_BLX)
            return x_BLX.reshape(*x_BLD.shape[:2], -1, self.width)

        products = dot(x_BLD, wq=self.wq[...], wk=self.wk[...], wv=self.wv[...])
        q_BLHK, k_BLHK, v_BLHK = map(heads, products, (self.bq, self.bk, self.bv))
        mixed_BLHK, cache = self.attend(q_BLHK, Keys((k_BLHK, v_BLHK)), given)
        (made_BLD,) = dot(mixed_BLHK.reshape(*x_BLD.shape[:2], -1), wo=self.wo[...])
        y_BLD = devices.leave(made_BLD)
        return y_BLD + broadcast_last(self.bo[...], y_BLD), cache


class GPT2MLP(nnx.Module):
    """down(gelu(up(x))), with the tanh form of GELU (Hendrycks and Gimpel 2016)."""

    def __init__(self, config: GPT2Config, parts: LayerParts, init: Init):
        d, f = config.d_model, config.d_ff
        out_std = 0.02 / (2 * config.n_layers) ** 0.5
        self.w_up = init("mlp/w_up", (d, f), 0.02, parts.cut(1))
        self.b_up = init("mlp/b_up", (f,), 0.0, parts.cut(0))
        self.w_down = init("mlp/w_down", (f, d), out_std, parts.cut(0))
        self.b_down = init("mlp/b_down", (d,), 0.0, parts.own(differs=parts.devices.sequence))
        self.devices = parts.devices

    def __call__(self, x_BLD: jax.Array, dot: Dot) -> jax.Array:
        """Transform each token: `[B, L, D] -> [B, L, D]`."""
        devices = self.devices
        (up_BLF,) = dot(devices.enter(x_BLD), w_up=self.w_up[...])
        hidden_BLF = jax.nn.gelu(up_BLF + broadcast_last(self.b_up[...], up_BLF), approximate=True)
        (down_BLD,) = dot(hidden_BLF, w_down=self.w_down[...])
        y_BLD = devices.leave(down_BLD)
        return y_BLD + broadcast_last(self.b_down[...], y_BLD)


class GPT2Layer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, config: GPT2Config, parts: LayerParts, init: Init):
        d, eps = config.d_model, config.norm_eps
        norm = parts.own(differs=parts.devices.sequence)
        self.attn_norm = LayerNorm("attn_norm", d, eps, init, norm)
        self.attn = GPT2Attention(config, parts, init)
        self.mlp_norm = LayerNorm("mlp_norm", d, eps, init, norm)
        self.mlp = GPT2MLP(config, parts, init)

    def __call__(self, x_BLD: jax.Array, given: LayerInputs) -> tuple[jax.Array, Cache | None]:
        """`[B, L, D] -> [B, L, D]`, and with slices the keys and values up to the slice's end."""
        mixed_BLD, cache = self.attn(self.attn_norm(x_BLD), given)
        x_BLD = x_BLD + given.masks.stream(mixed_BLD, "attention")
        return x_BLD + given.masks.stream(self.mlp(self.mlp_norm(x_BLD), given.dot), "mlp"), cache


class GPT2EmbedHead(nnx.Module):
    """Embedding and positions before the layers, final norm and head after them.

    The vocabulary is sharded over the devices that share them. All have all positions, which the
    first device adds. The head is the embedding.
    """

    def __init__(self, config: GPT2Config, parts: EmbedHeadParts, init: Init):
        d = config.d_model
        self.embed = init("embed", (config.vocab_size, d), 0.02, parts.cut(0))
        self.positions = init("positions", (config.max_seq_len, d), 0.01, parts.of_first())
        self.final_norm = LayerNorm("final_norm", d, config.norm_eps, init, parts.own())
        self.parts = parts

    def enter(self, tokens_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Embed tokens and their positions: `[B, L] -> [B, L, D]`."""
        token_BLD = self.parts.look_up(self.embed[...], tokens_BL)
        place_BLD = self.parts.by_first(self.positions[...][positions_BL])
        return self.parts.devices.leave(token_BLD + place_BLD)

    def leave(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the head's operands: `[B, L, D]` of all tokens, and its matrix `[D, V]`."""
        x_BLD = self.parts.devices.enter(self.final_norm(x_BLD))
        return x_BLD, self.embed[...].T.astype(x_BLD.dtype)
