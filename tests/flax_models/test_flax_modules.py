"""What modules of a Flax user may have and return, on one device: dtypes, types of variables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxpipe.core.executor import Execution
from jaxpipe.core.mesh import make_mesh
from jaxpipe.flax_models import from_flax
from jaxpipe.schedules import build

WIDTH, TYPES = 4, 6
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def tokens():
    ids = jax.random.randint(jax.random.key(1), (2, 2, 4), 0, TYPES)
    return {"inputs": ids[..., :-1], "targets": ids[..., 1:]}


def modules(dtype=jnp.float32, **more):
    """Return an embedding, one layer and a head."""
    how = {"rngs": nnx.Rngs(0), "dtype": dtype, **more}
    return [
        nnx.Embed(TYPES, WIDTH, **how), nnx.Linear(WIDTH, WIDTH, **how),
        nnx.Linear(WIDTH, TYPES, **how),
    ]  # fmt: skip


def pipelined(embed=None, layer=None, head=None, loss=cross_entropy, **options):
    plain = modules()
    schedule = build("gpipe", pp=1, microbatches=2)
    return from_flax(
        embed or plain[0], [layer or plain[1]], head or plain[2], loss,
        **{"schedule": schedule, "mesh": make_mesh(1, devices=jax.devices()[:1])} | options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [None, jnp.float16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.float16])
def test_float16_is_summed_in_float32(param_dtype, dtype):
    embed, layer, head = modules(jnp.float16, param_dtype=param_dtype)
    want = cross_entropy(head(layer(embed(tokens()["inputs"]))), tokens()["targets"])
    want = want.astype(jnp.float32).mean()
    pipeline = pipelined(embed, layer, head, execution=Execution(compute_dtype=dtype))
    loss, gradients = pipeline.loss_and_gradients(tokens())
    np.testing.assert_allclose(loss, want, rtol=2e-3)  # float16 has 11 bits
    bias = nnx.to_pure_dict(gradients)["params"]["embed_head"]["head"]["bias"]
    shares = jax.nn.softmax(head(layer(embed(tokens()["inputs"])))) - jax.nn.one_hot(
        tokens()["targets"], TYPES
    )
    np.testing.assert_allclose(bias, shares.mean((0, 1, 2)), atol=2e-3)


def test_a_loss_of_integers_has_its_mean():
    def errors(outputs, targets):
        return outputs.argmax(-1) != targets

    embed, layer, head = modules()
    wrong = errors(head(layer(embed(tokens()["inputs"]))), tokens()["targets"])
    assert 0 < wrong.mean() < 1
    loss = pipelined(embed, layer, head, loss=errors).loss(tokens())
    np.testing.assert_allclose(loss, wrong.mean(), rtol=1e-6)


class Frozen(nnx.Param):
    """A parameter that an optimizer of others leaves as it is."""


class Adapted(nnx.Module):
    def __init__(self):
        self.lora = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=nnx.Rngs(0))
        self.gain = Frozen(jnp.ones(WIDTH))

    def __call__(self, x):
        return x + self.lora(x) * self.gain[None, None]


@pytest.mark.parametrize(
    ("wrt", "changed"),
    [
        (nnx.LoRAParam, {"lora_b"}),  # the gradient at the other factor is 0, since lora_b is
        (nnx.All(nnx.Param, nnx.Not(Frozen)), {"lora_b", "kernel", "bias"}),
    ],
)
def test_variables_keep_their_types(wrt, changed):
    pipeline = pipelined(layer=Adapted())
    layer = lambda: nnx.to_pure_dict(nnx.state(pipeline.stage()))["layers"]["0"]  # noqa: E731
    before, optimizer = layer(), nnx.Optimizer(pipeline, optax.sgd(1.0), wrt=wrt)
    optimizer.update(pipeline, pipeline.loss_and_gradients(tokens())[1])
    found = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(layer()), strict=True)
    assert {path[-1].key for (path, old), new in found if (old != new).any()} == changed


def test_a_step_that_donates_its_state_leaves_the_modules():
    embed, layer, head = modules()
    pipeline = pipelined(embed, layer, head)
    optimizer = nnx.Optimizer(pipeline, optax.sgd(0.1), wrt=nnx.Param)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(pipeline, optimizer):
        optimizer.update(pipeline, pipeline.loss_and_gradients(tokens())[1])

    step(pipeline, optimizer)
    assert head(layer(embed(tokens()["inputs"]))).shape == (2, 2, 3, TYPES)


class Renamed(nnx.Module):
    """An embedding by numbers that 16-bit floats do not have."""

    def __init__(self):
        self.rows = nnx.Embed(600, WIDTH, rngs=nnx.Rngs(0))
        self.numbers = nnx.Param(jnp.arange(600))

    def __call__(self, inputs):
        return self.rows(self.numbers[...][inputs + 290])


def test_parameters_of_integers_are_not_cast():
    _, layer, head = modules()
    embed, how = Renamed(), Execution(compute_dtype=jnp.bfloat16)
    want = cross_entropy(head(layer(embed(tokens()["inputs"]))), tokens()["targets"]).mean()
    loss = pipelined(embed, layer, head, execution=how).loss(tokens())
    np.testing.assert_allclose(loss, want, rtol=2e-2)  # of bfloat16; cast numbers cannot index


class Average(nnx.Module):
    def __init__(self):
        self.mean = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean((0, 1))
        return x - self.mean[None, None]


class Held(nnx.Module):
    def __init__(self, variable):
        self.variable = variable

    def __call__(self, x):
        return x


class Twice(nnx.Module):
    def __call__(self, x):
        return x, x


class Dropping(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dropout(0.5, deterministic=False)(linen.Dense(WIDTH)(x))


def doubled():
    return nnx.Param(jnp.ones(2), on_get_value=lambda variable, value: 2 * value)


def initialised(module):
    return nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0, dropout=1)).lazy_init(jnp.ones((1, 3, WIDTH)))


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (lambda: {"layer": Average()}, r"layers\[0\] \(Average\) changes variables"),
        (lambda: {"layer": Held(doubled())}, "nnx.Param with on_get_value"),
        (lambda: {"layer": Held(nnx.Param({"a": jnp.ones(2)}))}, "nnx.Param that is a dict"),
        (lambda: {"layer": Held(nnx.Variable(jax.random.key(0)))}, "that is a random key"),
        (lambda: {"layer": Twice()}, r"layers\[0\] \(Twice\) returns a tuple"),
        (lambda: {"layer": initialised(Dropping())}, 'PRNG for "dropout".* without dropout'),
        (lambda: {"loss": lambda outputs, targets: (outputs, targets)}, "loss returns a tuple"),
        (lambda: {"count": lambda targets: targets > 0}, r"count returns an array of shape \(2, 3"),
        (lambda: {"schedule": "gpipe"}, "schedule is 'gpipe'"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        pipelined(**options()).loss(tokens())
    assert "\n" not in str(refused.value)


def test_layers_are_a_list():
    embed, layer, head = modules()
    schedule, mesh = build("gpipe", pp=1, microbatches=2), make_mesh(1, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="layers is a Linear"):
        from_flax(embed, layer, head, cross_entropy, schedule=schedule, mesh=mesh)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda batch: tuple(batch.values()), "the batch is a tuple"),
        (lambda batch: batch | {"targets": jnp.ones(2)}, r"a batch leaf has shape \(2,\)"),
        (lambda batch: batch | {"targets": [1.0, 2.0]}, r"a batch leaf has shape \(\)"),
    ],
)
def test_batches_that_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        pipelined().loss(change(tokens()))
