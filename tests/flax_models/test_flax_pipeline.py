"""Flax modules in a pipeline, against the plain Flax model on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import FLOAT64, assert_same
from flax import linen, nnx
from flax_models import (
    LENGTH,
    MLP,
    WIDTH,
    Attention,
    Embed,
    Head,
    Model,
    loss_terms,
    pipelined,
    small_model,
    tokens,
    whole,
)
from legal import near

from jaxpipe.core.contract.parameter import ParamSpec
from jaxpipe.core.executor import Execution
from jaxpipe.core.mesh import make_mesh
from jaxpipe.core.schedule import ScheduleError
from jaxpipe.flax_models.modules import ModuleFunction
from jaxpipe.schedules import BUILDERS, build


class Wide(MLP):
    """The same computation with other shapes."""

    def __init__(self, rngs):
        super().__init__(rngs, hidden=24)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def check(model, schedule, dp=1, tp=1, **options):
    """Compare loss and gradients with `jax.value_and_grad` of the plain model."""
    batch = tokens(schedule.microbatches, 2 * dp)
    want_loss, want = nnx.jit(nnx.value_and_grad(Model.loss))(model, batch)
    pipeline = pipelined(model, schedule, dp, tp, **options)
    loss, gradients = pipeline.loss_and_gradients(batch)
    np.testing.assert_allclose(loss, want_loss, rtol=FLOAT64)
    nnx.update(pipeline, gradients)
    got = nnx.state(whole(pipeline), nnx.Param)
    assert_same(nnx.to_pure_dict(got), nnx.to_pure_dict(want))
    return pipeline


@pytest.mark.slow(unless=["zb_h1-2"])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule(name, pp):
    """Layers of two kinds, unevenly over stages."""
    schedule = near(name, pp, 2 * pp, virtual_stages=2)
    layers = [Wide if i % 3 == 1 else MLP for i in range(schedule.stages + 1)]
    pipeline = check(small_model(layers), schedule)
    assert len(pipeline.pipeline.functions.kinds_by_name) == 2


@pytest.mark.extended
@pytest.mark.slow(unless=["2-2-*"])
@pytest.mark.parametrize(
    ("pp", "dp", "tp", "name", "execution"),
    [
        (2, 2, 2, "zb_h1", Execution()),
        (4, 1, 2, "zbv", Execution(remat="full")),
        (2, 1, 2, "dualpipe", Execution(zero_stage=1)),
        (1, 1, 2, "gpipe", Execution()),
        (4, 2, 1, "1f1b", Execution(zero_stage=2)),
    ],
)
def test_metadata_shards_over_tp(pp, dp, tp, name, execution):
    schedule = near(name, pp, 2 * pp)
    layers = [Attention, MLP] * schedule.stages
    pipeline = check(small_model(layers), schedule, dp, tp, execution=execution)
    up = next(slot["up"] for slot in pipeline.params["layers"] if "up" in slot)
    assert up["kernel"][...].sharding.shard_shape((pp, WIDTH, 16))[2] == 16 // tp


def test_modules_created_on_the_mesh():
    """Flax then shards parameters over tp as it creates them; values are the same."""
    schedule, batch = build("gpipe", pp=1, microbatches=2), tokens(2, 2)
    with jax.set_mesh(make_mesh(1, tp=2, devices=jax.devices()[:2])):
        rngs = nnx.Rngs(0)
        embed, head = Embed(rngs), Head(rngs)
        model = Model(embed, [MLP(rngs)], head)
    assert len(model.layers[0].up.kernel[...].sharding.device_set) == 2
    loss = pipelined(model, schedule, tp=2).loss(batch)
    np.testing.assert_allclose(loss, small_model([MLP]).loss(batch), rtol=FLOAT64)


def test_specs_follow_metadata():
    """Logical axes are resolved by their rules; other mesh axes than tp are left to ZeRO."""
    rules = {"sharding_rules": (("hidden", ("dp", "tp")), ("model", None))}
    init = nnx.initializers.normal()
    with nnx.use_eager_sharding(False):
        layer = nnx.Linear(
            4, 6, rngs=nnx.Rngs(0), bias_init=nnx.with_partitioning(init, ("tp2",)),
            kernel_init=nnx.with_partitioning(init, ("model", "hidden"), **rules),
        )  # fmt: skip
    function, _ = ModuleFunction.split("layer", layer, 2)
    assert function.specs == {
        "bias": ParamSpec(),
        "kernel": ParamSpec(sharded=(("tp", 1),), matrix=(0, 1)),
    }


@pytest.mark.slow(only=["1"])
@pytest.mark.parametrize("tp", [1, 2])
def test_embedding_and_head_may_be_tied(tp):
    pipeline = check(
        small_model([MLP, MLP], tied=True), build("zb_h1", pp=2, microbatches=4), 1, tp
    )
    stage = pipeline.stage()
    assert stage.head.tied.embedding is stage.embed.tokens.embedding


class LinenMLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.normal(0.3), (None, "tp"))
        h = linen.Dense(16, kernel_init=init, param_dtype=jnp.float64)(x)
        return x + linen.Dense(WIDTH, param_dtype=jnp.float64)(linen.gelu(h))


@pytest.mark.slow(only=["1"])
@pytest.mark.parametrize("tp", [1, 2])
def test_linen_modules(tp):
    x = jnp.ones((1, LENGTH, WIDTH))

    def layer(rngs):
        return nnx.bridge.ToNNX(LinenMLP(), rngs=rngs).lazy_init(x)

    pipeline = check(small_model([layer, layer]), build("1f1b", pp=2, microbatches=4), 1, tp)
    assert len(pipeline.pipeline.functions.kinds_by_name) == 1


@pytest.mark.extended
def test_training_equals_a_plain_loop():
    """Five steps of AdamW under one global norm give the losses of a plain Flax loop."""
    model, batch = small_model([MLP, Wide, MLP]), tokens(4, 2)
    pipeline = pipelined(model, build("zbv", pp=1, microbatches=4), layers_per_stage=(1, 2))

    def losses(trained, gradients):
        optimizer = nnx.Optimizer(
            trained, optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.02)), wrt=nnx.Param
        )

        @nnx.jit
        def step(trained, optimizer):
            loss, found = gradients(trained)
            optimizer.update(trained, found)
            return loss

        return [float(step(trained, optimizer)) for _ in range(5)]

    got = losses(pipeline, lambda trained: trained.loss_and_gradients(batch))
    want = losses(model, nnx.value_and_grad(lambda model: model.loss(batch)))
    np.testing.assert_allclose(got, want, rtol=FLOAT64)
    assert want[-1] < want[0] - 0.1
    np.testing.assert_allclose(pipeline.loss(batch), model.loss(batch), rtol=FLOAT64)


def test_a_mean_over_counted_targets():
    """Targets of -1 do not count; one microbatch has fewer of the others."""
    model, batch = small_model([MLP, MLP]), tokens(4, 2)
    targets = batch["targets"].at[1, :, 1:].set(-1)

    def valid(outputs, targets):
        return jnp.where(targets < 0, 0, loss_terms(outputs, jnp.maximum(targets, 0)))

    pipeline = pipelined(
        model, build("1f1b", pp=2, microbatches=4), loss=valid, count=lambda t: (t >= 0).sum()
    )
    got = pipeline.loss({**batch, "targets": targets})
    terms = jax.vmap(lambda inputs, targets: valid(model(inputs), targets))(
        batch["inputs"], targets
    )
    np.testing.assert_allclose(got, terms.sum() / (targets >= 0).sum(), rtol=FLOAT64)


class Masked(MLP):
    """It has a constant that is no variable, and a variable that calls read."""

    def __init__(self, rngs, scale=2.0):
        super().__init__(rngs)
        self.mask, self.scale = jnp.arange(WIDTH) % 2, nnx.BatchStat(jnp.full(1, scale))

    def __call__(self, x):
        return super().__call__(x * self.mask[None, None] * self.scale[None, None])


def test_constants_may_be_read():
    def other(rngs):
        return Masked(rngs, 3.0)

    pipeline = check(small_model([Masked, Masked, other]), build("1f1b", pp=1, microbatches=2))
    assert pipeline.pipeline.functions.order[0] == pipeline.pipeline.functions.order[1]
    assert len(pipeline.pipeline.functions.kinds_by_name) == 2


class Counting(MLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.zeros(1))

    def __call__(self, x):
        self.calls[...] += 1
        return super().__call__(x)


def dropping(rngs):
    return nnx.Sequential(MLP(rngs), nnx.Dropout(0.1, rngs=rngs))


def widening(rngs):
    return nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs, param_dtype=jnp.float64)


def uninitialised(rngs):
    return nnx.bridge.ToNNX(LinenMLP(), rngs=rngs)


@pytest.mark.parametrize(
    ("kinds", "tp", "names"),
    [
        ([], 1, ["empty"]),
        ([MLP], 1, ["1 layers", "2 stages"]),
        ([MLP, dropping], 1, ["layers[1] (Sequential)", "random state"]),
        ([uninitialised, uninitialised], 1, ["layers[0]", "lazy_init"]),
        ([widening, widening], 1, ["layers[0] (Linear)", "float64[2, 5, 16]", "float64[2, 5, 8]"]),
        ([Counting, Counting], 1, ["layers[0] (Counting)", "changes variables"]),
        ([MLP, lambda rngs: MLP(rngs, hidden=15)], 2, ["layers[1]", "tp=2", "15"]),
    ],
)
def test_refusals(kinds, tp, names):
    model, schedule = small_model(kinds), build("1f1b", pp=2, microbatches=2)
    with pytest.raises((ValueError, ScheduleError)) as refused:
        pipelined(model, schedule, 1, tp).loss_and_gradients(tokens(2, 2))
    sentence = str(refused.value)
    assert [name for name in names if name not in sentence] == [], sentence
    assert "\n" not in sentence


class Loose:
    """Like `Model`, but any object may be a layer."""

    def __init__(self, embed, layers, head):
        self.embed, self.layers, self.head = embed, layers, head


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda model: [model.layers[0], jnp.tanh], r"layers\[1\] .* must be an nnx.Module"),
        (lambda model: [LinenMLP(), model.layers[0]], r"layers\[0\] \(LinenMLP\) .*ToNNX"),
        (lambda model: [model.layers[0]] * 2, r"layers\[0\] .* and layers\[1\] .* share"),
        (lambda model: [model.layers[0], model.embed.tokens], r"embed and layers\[1\] .* share"),
    ],
)
def test_what_layers_cannot_be(change, sentence):
    model = small_model([MLP, MLP])
    loose = Loose(model.embed, change(model), model.head)
    with pytest.raises(ValueError, match=sentence):
        pipelined(loose, build("1f1b", pp=2, microbatches=2))


def test_a_mesh_with_tp_needs_metadata():
    plain = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    other = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1), param_dtype=jnp.float64)
    model = small_model([])
    with pytest.raises(ValueError, match="no parameter's metadata names"):
        pipelined(
            Loose(nnx.Linear(2, WIDTH, rngs=nnx.Rngs(2)), [plain, other], model.head),
            build("1f1b", pp=2, microbatches=2), 1, 2,
        )  # fmt: skip


def test_gradients_by_layer_are_those_of_the_modules():
    """Layers of two kinds, unevenly on two ranks of two stages, against `nnx.grad`."""
    schedule = near("interleaved_1f1b", 2, 4, virtual_stages=2)
    model = small_model([Wide if i % 3 == 1 else MLP for i in range(schedule.stages + 1)])
    batch = tokens(schedule.microbatches, 2)
    want = nnx.to_pure_dict(nnx.grad(Model.loss)(model, batch))
    pipeline = pipelined(model, schedule)
    got = pipeline.by_layer(pipeline.loss_and_gradients(batch)[1])
    assert got.keys() == {"embed", "layers", "head"}
    assert_same(got["embed"], want["embed"])
    assert_same(got["head"], want["head"])
    assert_same(dict(enumerate(got["layers"])), want["layers"])


def test_state_by_layer_moves_to_another_schedule_and_mesh():
    """Parameters and moments, in bits; a step later both pipelines are still the same."""
    model, moved = small_model([MLP] * 4), small_model([MLP] * 4)
    batch, transformation = tokens(4, 2), optax.adam(0.1)
    first = pipelined(model, near("zb_h1", 4, 4))
    second = pipelined(moved, near("1f1b", 2, 4))
    optimizers = [nnx.Optimizer(one, transformation, wrt=nnx.Param) for one in (first, second)]
    optimizers[0].update(first, first.loss_and_gradients(batch)[1])
    saved = [first.by_layer(one) for one in (first, optimizers[0])]
    for module, tree in zip((second, optimizers[1]), jax.tree.map(np.asarray, saved)):
        second.set_by_layer(module, tree)
    for one, tree in zip((second, optimizers[1]), saved):
        jax.tree.map(np.testing.assert_array_equal, second.by_layer(one), tree)
    for pipeline, optimizer in zip((first, second), optimizers):
        optimizer.update(pipeline, pipeline.loss_and_gradients(batch)[1])
    assert_same(second.by_layer(second), first.by_layer(first))


def test_a_state_of_another_model_is_refused():
    pipeline = pipelined(small_model([MLP] * 4), near("1f1b", 2, 4))
    tree = pipeline.by_layer(pipeline)
    with pytest.raises(ValueError, match="3 layers but the pipeline 4"):
        pipeline.set_by_layer(pipeline, tree | {"layers": tree["layers"][:3]})
    wider = tree | {"head": jax.tree.map(jnp.ravel, tree["head"])}
    with pytest.raises(ValueError, match="other names or shapes"):
        pipeline.set_by_layer(pipeline, {})
    with pytest.raises(ValueError, match="other names or shapes"):
        pipeline.set_by_layer(pipeline, wider)


def test_a_batch_of_other_keys_is_refused():
    pipeline = pipelined(small_model([MLP, MLP]), build("1f1b", pp=2, microbatches=2))
    with pytest.raises(ValueError, match="targets"):
        pipeline.loss_and_gradients({"inputs": tokens(2, 2)["inputs"]})
