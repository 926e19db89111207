"""Small Flax models, whole on one device and in a pipeline."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpipe.core.executor import Execution
from jaxpipe.core.mesh import make_mesh
from jaxpipe.flax_models import from_flax

VOCAB, WIDTH, LENGTH, HEADS = 12, 8, 5, 2
loss_terms = optax.softmax_cross_entropy_with_integer_labels


def drawn(*names):
    """Initial values that no gradient misses, sharded over the named axes."""
    return nnx.with_partitioning(nnx.initializers.normal(0.3), names)


class Embed(nnx.Module):
    def __init__(self, rngs):
        like = {"rngs": rngs, "param_dtype": jnp.float64}
        self.tokens = nnx.Embed(VOCAB, WIDTH, embedding_init=drawn("tp", None), **like)
        self.positions = nnx.Embed(LENGTH, WIDTH, **like)

    def __call__(self, tokens):
        return self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))[None]


class Head(nnx.Module):
    def __init__(self, rngs, tied=None):
        like = {"rngs": rngs, "param_dtype": jnp.float64}
        self.norm, self.tied = nnx.LayerNorm(WIDTH, **like), nnx.data(tied)
        if tied is None:
            self.matrix = nnx.Linear(WIDTH, VOCAB, **like)

    def __call__(self, x):
        x = self.norm(x)
        return self.matrix(x) if self.tied is None else self.tied.attend(x)


class MLP(nnx.Module):
    def __init__(self, rngs, hidden=16):
        like = {"rngs": rngs, "param_dtype": jnp.float64}
        self.norm = nnx.LayerNorm(WIDTH, **like)
        self.up = nnx.Linear(
            WIDTH, hidden, kernel_init=drawn(None, "tp"), bias_init=drawn("tp"), **like
        )
        self.down = nnx.Linear(hidden, WIDTH, kernel_init=drawn("tp", None), **like)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def attend(query, key, value, mask=None, **_):
    """Attention that keeps float64, where `jax.nn.dot_product_attention` computes in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), value)


class Attention(nnx.Module):
    """Without biases: a key's bias has no gradient, only its rounding."""

    def __init__(self, rngs):
        like = {"rngs": rngs, "param_dtype": jnp.float64}
        self.norm = nnx.LayerNorm(WIDTH, **like)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, attention_fn=attend, use_bias=False,
            kernel_init=drawn(None, "tp", None), out_kernel_init=drawn("tp", None, None), **like,
        )  # fmt: skip

    def __call__(self, x):
        return x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))


class Model(nnx.Module):
    """The plain model on one device."""

    def __init__(self, embed, layers, head):
        self.embed, self.layers, self.head = embed, nnx.List(layers), head

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch):
        """Mean loss over all microbatches."""
        one = lambda rows: loss_terms(self(rows[0]), rows[1])  # noqa: E731
        return jnp.stack([one(rows) for rows in zip(batch["inputs"], batch["targets"])]).mean()


def small_model(layers, tied=False, seed=0):
    """`Model` with these kinds of layers, annotated and not placed on a mesh."""
    with nnx.use_eager_sharding(False):
        rngs = nnx.Rngs(seed)
        embed = Embed(rngs)
        head = Head(rngs, embed.tokens if tied else None)
        return Model(embed, [kind(rngs) for kind in layers], head)


def tokens(microbatches, sequences):
    drawn = jax.random.randint(
        jax.random.key(1), (microbatches, sequences, LENGTH + 1), 0, VOCAB, jnp.int32
    )
    return {"inputs": drawn[..., :-1], "targets": drawn[..., 1:]}


def pipelined(model, schedule, dp=1, tp=1, loss=loss_terms, **options):
    devices = jax.devices()[: schedule.pp * dp * tp]
    options.setdefault("execution", Execution(poison_bubbles=True))
    return from_flax(
        model.embed, list(model.layers), model.head, loss,
        schedule=schedule, mesh=make_mesh(schedule.pp, dp, tp, devices), **options,
    )  # fmt: skip


def whole(pipeline):
    """The pipeline's model, with its parameters."""
    stage = pipeline.stage()
    return Model(stage.embed, [stage.layers[i] for i in sorted(stage.layers, key=int)], stage.head)
