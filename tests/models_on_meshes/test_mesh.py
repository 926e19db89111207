"""The decoder on meshes (pp, dp, tp) against one device: losses, gradients, and their shards."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from jax.sharding import PartitionSpec
from layer_outputs import recording
from mesh_models import SIZES
from meshes import (
    EXAMPLES,
    LENGTH,
    MICROBATCHES,
    MODELS,
    PLAIN,
    pipeline_of,
    problem,
    run,
    wanted,
)
from oracles.decoder import LayerBytes, hidden_bytes, layer_bytes
from programs import eqns_of

from jaxpipe.core.contract import Context
from jaxpipe.core.executor import Execution, Pipeline, losses_and_gradients_ref, step_ref
from jaxpipe.core.mesh import ContextParallel, Sharding, StageLayout, TensorParallel, make_mesh
from jaxpipe.core.schedule import Lockstep
from jaxpipe.core.split import POLICIES, split_layer
from jaxpipe.core.split.split import Cotangent
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.model.options import Sharing
from jaxpipe.schedules import build

SHARED = Lockstep(vocab_parallel=True)


@pytest.mark.slow(unless=["grouped-4-*"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("model", "tp"), [("grouped", 2), ("normed", 4), ("tied", 2), ("one_kv", 4), ("grouped", 4)]
)
def test_devices_that_share_layers(model, tp, sequence):
    with jax.enable_x64(True):
        got, want = run(model, "1f1b", 1, 1, tp, sequence=sequence, dtype=jnp.float64)
        assert_same(got, want)


MESHES = [(2, 2, 2), (4, 1, 2), (2, 1, 4), (2, 4, 1)]
ZERO = {  # by schedule, ZeRO stages on the first and the last mesh; 4: stage 3 with resharding
    "1f1b": (3, 0),
    "zb_h1": (1, 4),
    "interleaved_1f1b": (2, 3),
    "dualpipe": (4, 1),
}


@pytest.mark.slow(unless=["zb_h1-(2, 2, 2)", "interleaved_1f1b-(2, 2, 2)", "dualpipe-(2, 2, 2)"])
@pytest.mark.parametrize(
    ("schedule", "mesh"),
    [*product(ZERO, (MESHES[0], MESHES[-1])), ("zb_h1", MESHES[1]), ("dualpipe", MESHES[2])],
    ids=str,
)
def test_schedules_on_meshes(schedule, mesh):
    model = "deep" if schedule == "interleaved_1f1b" and mesh[0] == 4 else "one_kv"
    stage = ZERO[schedule][mesh[1] == 4]
    zero = {"zero_stage": min(stage, 3), "reshard_after_forward": stage == 4}
    with jax.enable_x64(True):
        assert_same(*run(model, schedule, *mesh, sequence=mesh[2] > 1, dtype=jnp.float64, **zero))


@pytest.mark.slow(unless=["zb_h1-(2, 4, 1)-4"])
@pytest.mark.parametrize(
    ("schedule", "mesh", "cp"),
    [
        *((name, (2, 2, 2), 2) for name in ("1f1b", "zb_h1", "interleaved_1f1b", "dualpipe")),
        ("interleaved_1f1b", (2, 4, 1), 2),
        ("zb_h1", (2, 4, 1), 4),
        ("dualpipe", (2, 4, 1), 4),
    ],
    ids=str,
)
def test_replicas_that_share_sequences(schedule, mesh, cp):
    how = {"sequence": mesh[2] > 1, "zero_stage": 2 + (cp == 4), "reshard_after_forward": cp == 4}
    with jax.enable_x64(True):
        assert_same(*run("one_kv", schedule, *mesh, cp=cp, dtype=jnp.float64, **how))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["selective", "full"])
def test_keys_of_shared_sequences_are_gathered_again(remat):
    how = {"cp": 2, "remat": remat, "dtype": jnp.float64}
    with jax.enable_x64(True):
        assert_same(*run("normed", "zb_h1", 2, 2, 1, **how))
        assert_same(*run("normed", "1f1b", 2, 2, 2, lockstep=SHARED, **how))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "sequence"),
    [("1f1b", False), ("1f1b", True), ("zb_h1", True), ("interleaved_1f1b", True),
     ("dualpipe", True)],
)  # fmt: skip
def test_every_layers_output_and_the_gradient_at_it(schedule, sequence):
    """For every example, read from inside the pipeline through the gradients of tables."""
    with jax.enable_x64(True):
        decoder, shared, layers, batch = problem("normed", jnp.float64)
        tables = jnp.zeros((MICROBATCHES * EXAMPLES, LENGTH, SIZES["d_model"]))
        layers = [{"layer": layer, "tables": {"y": tables, "dy": tables}} for layer in layers]
        ids = jnp.arange(MICROBATCHES * EXAMPLES).reshape(MICROBATCHES, EXAMPLES, 1)
        batch = batch | {"example": jnp.broadcast_to(ids, batch["inputs"].shape)}
        built = build(schedule, pp=2, microbatches=MICROBATCHES)
        layout = StageLayout((SIZES["n_layers"] // built.stages,) * built.stages, built.placement)
        shared_by_two = LlamaDecoder(MODELS["normed"], Sharing(TensorParallel(2, sequence)))
        pipeline = Pipeline(
            recording(shared_by_two), built, make_mesh(2, 2, 2), layout.layers_per_stage,
            Execution(zero_stage=2),
        )  # fmt: skip
        params = {"embed_head": shared, "layers": layout.stack(layers)}
        _, got = jax.jit(pipeline.losses_and_gradients)(params, batch)
        _, want = losses_and_gradients_ref(recording(decoder), shared, layers, batch)
        for found, layer in zip(layout.unstack(got["layers"]), want["layers"]):
            assert layer["tables"]["y"].any((1, 2)).all()
            assert_same(found["tables"], layer["tables"])


@pytest.mark.slow(only=["own vocabulary", "shared vocabulary"])
@pytest.mark.parametrize("lockstep", [PLAIN, SHARED], ids=["own vocabulary", "shared vocabulary"])
def test_what_the_model_gives_back_of_every_microbatch(lockstep):
    """The residual stream after the last layer, all-gathered over tp."""
    devices = TensorParallel(2, sequence=True)
    with jax.enable_x64(True):
        pipeline, _, params, batch = pipeline_of(
            "tied", "dualpipe", 2, 2, 2, sequence=True, lockstep=lockstep, dtype=jnp.float64
        )
        gives = replace(pipeline.functions, outputs=lambda ends, x, rows: devices.enter(x))
        got = jax.jit(replace(pipeline, functions=gives).step)(params, batch)
        decoder, shared, layers, batch = problem("tied", jnp.float64)
        gives = replace(decoder.functions, outputs=lambda ends, x, rows: x)
        want = step_ref(gives, shared, layers, batch)
        assert_same((got.outputs, got.losses), (want.outputs, want.losses))


def test_forward_only_on_a_whole_mesh():
    pipeline, _, params, batch = pipeline_of(
        "tied", "1f1b", 2, 2, 2, sequence=True, zero_stage=3, reshard_after_forward=True
    )
    losses = jax.jit(pipeline.losses)(params, batch)
    np.testing.assert_allclose(losses, wanted("tied", jnp.float32)[0], rtol=1e-6, atol=1e-9)


@pytest.mark.extended
@pytest.mark.slow(unless=["full"])
@pytest.mark.parametrize("remat", ["selective", "full"])
def test_what_is_computed_again_is_gathered_again(remat):
    how = {"sequence": True, "remat": remat, "dtype": jnp.float64}
    with jax.enable_x64(True):
        assert_same(*run("tied", "zb_h1", 2, 1, 2, **how))
        assert_same(*run("tied", "1f1b", 2, 1, 2, **how))


def test_half_precision_on_a_whole_mesh():
    got, want = run(
        "grouped", "1f1b", 2, 2, 2, sequence=True, zero_stage=3, compute_dtype=jnp.bfloat16
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1.5e-2, atol=1e-6)
    for g, w in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1])):
        assert g.dtype == jnp.float32
        assert np.sqrt(np.mean(np.square(g - w)) / np.mean(np.square(w))) < 2e-2


def traced_step(*, reshard):
    """Return a ZeRO 3 step's jaxpr on two ranks of two layers, and counts of sharded leaves."""
    _, shared, layers, batch = problem("grouped", jnp.float32)
    layout = StageLayout((2, 2))
    execution = Execution(zero_stage=3, reshard_after_forward=reshard)
    decoder = LlamaDecoder(MODELS["grouped"])
    mesh = make_mesh(2, 2, devices=jax.devices()[:4])
    pipeline = Pipeline(
        decoder.functions, build("1f1b", pp=2, microbatches=MICROBATCHES), mesh,
        execution=execution,
    )  # fmt: skip
    params = {"embed_head": shared, "layers": layout.stack(layers)}
    stored = pipeline.sharding.param_shardings(params)
    cut = {
        part: sum(leaf.dim_of("dp") is not None for leaf in jax.tree.leaves(stored[part]))
        for part in stored
    }
    assert cut == {"embed_head": 3, "layers": 2 * 9}
    return jax.make_jaxpr(pipeline.losses_and_gradients)(params, batch).jaxpr, cut


@pytest.mark.parametrize("reshard", [False, True])
def test_parameters_are_gathered_once_a_step_or_for_every_action(reshard):
    """One all-gather and one reduce-scatter per sharded leaf: outside the scan, or per branch."""
    jaxpr, cut = traced_step(reshard=reshard)
    count = {}
    for eqn, inside in eqns_of(jaxpr):
        names = eqn.params.get("axis_name")
        if names is not None and "dp" in jax.tree.leaves(names):
            key = eqn.primitive.name, inside
            count[key] = count.get(key, 0) + 1
    gathers = {inside: count.get(("all_gather", inside), 0) for inside in (False, True)}
    scatters = {inside: count.get(("reduce_scatter", inside), 0) for inside in (False, True)}
    if reshard:  # layers in the branches of F and BW
        assert gathers == {False: cut["embed_head"], True: 2 * cut["layers"]}
        assert scatters == {False: cut["embed_head"], True: cut["layers"]}
    else:
        assert gathers == {False: cut["embed_head"] + cut["layers"], True: 0}
        assert scatters == {False: cut["embed_head"] + cut["layers"], True: 0}


def test_a_layer_is_gathered_while_the_one_before_computes():
    """In F and BW the second all-gather starts with the first layer; in F it ends with it."""
    jaxpr, cut = traced_step(reshard=True)
    eqns = [eqn for eqn, inside in eqns_of(jaxpr) if inside]
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    barrier_of = {id(var): id(eqn) for eqn in barriers for var in eqn.outvars}
    gathers = [eqn for eqn in eqns if eqn.primitive.name == "all_gather"]
    ahead = [eqn for eqn in gathers if id(eqn.invars[0]) in barrier_of]
    assert len(ahead) == cut["layers"]  # one layer's, in both branches
    assert len({barrier_of[id(eqn.invars[0])] for eqn in ahead}) == 2
    gathered = {id(eqn.outvars[0]) for eqn in ahead}
    (end,) = (eqn for eqn in barriers if gathered.intersection(map(id, eqn.invars)))
    assert len(gathered.intersection(map(id, end.invars))) == cut["layers"] // 2
    waiting = {id(var) for eqn in ahead for var in eqn.invars}
    starts = [eqn for eqn in barriers if waiting.intersection(map(id, eqn.outvars))]
    made_by_end = set(map(id, end.outvars))
    assert not any(made_by_end.intersection(map(id, eqn.invars)) for eqn in starts)


SHARING = {  # tensor or context parallelism over two devices: the mesh, and what of `Sharing`
    "tp": ((1, 1, 2), {"devices": TensorParallel(2, sequence=True)}),
    "cp": ((1, 2, 1), {"sequence": ContextParallel(2)}),
}


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("model", ["grouped", "normed"])
@pytest.mark.parametrize("shared", SHARING)
def test_what_is_cut_along_the_sequence_is_stored_in_parts(model, remat, shared):
    """A device stores and sends what the plan counts: half of one device's bytes."""
    sizes_of_mesh, how = SHARING[shared]
    config, mesh = MODELS[model], make_mesh(*sizes_of_mesh, devices=jax.devices()[:2])
    decoder = LlamaDecoder(config, Sharing(**how))
    length = LENGTH // decoder.sharing.sequence.size
    ids = jax.ShapeDtypeStruct((EXAMPLES, length), "int32")
    key, found = jax.random.key(0), []
    layer = jax.eval_shape(lambda: decoder.init_layer(key, 0))
    ends = jax.eval_shape(lambda: decoder.init_embed_head(key))
    leaves = decoder.leaves
    stored = Sharding(mesh, leaves["embed_head"], lambda slot: leaves["layer"]).param_shardings(
        {
            "embed_head": ends,
            "layers": (
                jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype), layer),
            ),
        }
    )

    def look(ends, layer, microbatch):
        x = jax.eval_shape(decoder.embed, ends, microbatch)
        context = Context(microbatch, jax.ShapeDtypeStruct((), jnp.int32))
        split = split_layer(decoder.layer, layer, x, context, POLICIES[remat])
        size = lambda tree: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))  # noqa: E731
        kept = split.residuals
        if remat == "none":
            args = layer, context, kept, Cotangent(x)
            of_b = jax.make_jaxpr(split.backward_input)(*args)
            of_w = jax.make_jaxpr(split.backward_weight)(layer, context, kept.for_w, split.stash)
            of_both = jax.make_jaxpr(split.backward)(*args)
            gathers = lambda made: sum(  # noqa: E731
                eqn.primitive.name == "all_gather" for eqn in made.jaxpr.eqns
            )
            # tp, B: dy of out and down; W: these, and the inputs of the others. cp, B: k and v.
            wanted = (2, 4, 4) if shared == "tp" else (2, 0, 2)
            assert (gathers(of_b), gathers(of_w), gathers(of_both)) == wanted
        found.append((LayerBytes(size(kept.for_b), size(kept.for_w), size(split.stash)), size(x)))

    specs = (
        jax.tree.map(lambda s: s.partition_spec, stored["embed_head"]),
        jax.tree.map(lambda s: s.without_leading_axis.partition_spec, stored["layers"][0]),
        PartitionSpec(),
    )
    run = jax.shard_map(look, mesh=mesh, in_specs=specs, out_specs=None, check_vma=False)
    jax.eval_shape(run, ends, layer, {"inputs": ids, "targets": ids})
    sizes = {"batch": EXAMPLES, "seq_len": LENGTH, "itemsize": 4}
    cut = {"tp": 2, "sequence_parallel": True} if shared == "tp" else {"cp": 2}
    assert found[-1] == (
        layer_bytes(config, remat=remat, **sizes, **cut),
        hidden_bytes(config, **sizes, **cut),
    )
    assert 2 * found[-1][1] == hidden_bytes(config, **sizes)
