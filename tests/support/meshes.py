"""A small decoder on meshes, and the same parameters and batch on one device."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from draws import draw
from mesh_models import MODELS

from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.core.contract.experts import ALL_EXPERTS
from jaxpipe.core.contract.sequence import FULL_SEQUENCE
from jaxpipe.core.executor import Execution, Pipeline, losses_and_gradients_ref
from jaxpipe.core.mesh import (
    ContextParallel,
    ExpertParallel,
    ReplicaFactors,
    StageLayout,
    TensorParallel,
    VocabularyParallel,
    make_mesh,
    shard_batch,
)
from jaxpipe.core.schedule import Costs, recompute_ahead
from jaxpipe.core.schedule.lockstep import PLAIN
from jaxpipe.model import FAMILIES
from jaxpipe.model.layers.moe.balance import REAL
from jaxpipe.model.loss import IGNORE
from jaxpipe.model.neighbours import neighbour_rows
from jaxpipe.model.options import Loss, Ops, Sharing
from jaxpipe.schedules import build

MICROBATCHES, EXAMPLES, LENGTH = 8, 4, 8
# Lengths of documents in a row of LENGTH; the rest is padding.
ROWS = ((3, 5), (8,), (1, 2, 1, 2), (2, 6), (), (4, 1, 3), (5, 2), (1, 1, 6), (7,))


@cache
def problem(model, dtype, examples=EXAMPLES):
    config, key = MODELS[model], jax.random.key(0)
    decoder = FAMILIES[config.family].build(config, ops=packing_of(model))

    shared = draw(partial(decoder.init_embed_head, key), dtype=dtype)
    layers = [
        draw(partial(decoder.init_layer, key, i, kind), seed=i, dtype=dtype)
        for i, kind in enumerate(config.layer_kinds)
    ]
    rng = np.random.default_rng(1)
    shape = MICROBATCHES, examples, LENGTH + 1
    tokens = rng.integers(config.vocab_size, size=shape, dtype=np.int32)
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    targets = np.where(targets % 7 == 3, IGNORE, targets)
    targets[1] = IGNORE
    batch = {"inputs": inputs, "targets": targets}
    if "samples" in decoder.functions.batch_keys:
        numbers = 5 + np.arange(MICROBATCHES * examples, dtype=np.int32)
        numbers = numbers.reshape(MICROBATCHES, examples, 1)
        batch["samples"] = np.broadcast_to(numbers, inputs.shape)
    if model.startswith("packed"):
        batch = packed(batch)
    return decoder, shared, layers, with_neighbours(config, batch)


def with_neighbours(config, batch):
    """Add the rows of a model that predicts further tokens, or reads earlier ones."""
    batch = jax.device_get(batch)
    return batch | neighbour_rows(batch, config)


def packing_of(model):
    """Return the operations of a model, which may have packed rows."""
    return Ops(documents=max(map(len, ROWS)) if model.startswith("packed") else 0)


def rows_of(batch):
    """Return document lengths in each row of a batch, `[M][B]`; no two microbatches are alike."""
    m, b, _ = batch["inputs"].shape
    return [[ROWS[(i + 3 * j) % len(ROWS)] for j in range(b)] for i in range(m)]


def packed(batch):
    """Return the same tokens as documents; last tokens of documents and padding have no target."""
    segments = np.full(batch["inputs"].shape, -1, np.int32)
    positions, targets = np.zeros_like(segments), np.array(batch["targets"])
    for i, rows in enumerate(rows_of(batch)):
        for j, lengths in enumerate(rows):
            ends = np.cumsum(lengths, dtype=int)
            for number, (length, end) in enumerate(zip(lengths, ends)):
                segments[i, j, end - length : end] = number
                positions[i, j, end - length : end] = np.arange(length)
            targets[i, j, [*(ends - 1), *range(sum(lengths), LENGTH)]] = IGNORE
    documents = {"segments": jnp.array(segments), "positions": jnp.array(positions)}
    return batch | documents | {"targets": jnp.array(targets)}


def alone(batch):
    """Return every document of a packed batch as an example whose other tokens do not count.

    Every row gives as many examples as the fullest row. A causal model ignores later tokens.
    """
    m, b, length = batch["inputs"].shape
    most = max(map(len, ROWS))
    own = {"inputs": np.zeros((m, b, most, length), int)}
    own["targets"] = np.full((m, b, most, length), IGNORE)
    own[REAL] = np.zeros((m, b, most, length), int)
    for i, j, number in np.ndindex(m, b, most):
        of_document = np.asarray(batch["segments"][i, j]) == number
        for name, leaf in own.items():
            of_row = np.asarray(batch[name][i, j]) if name in batch else np.ones(length, int)
            leaf[i, j, number, : of_document.sum()] = of_row[of_document]
    return {name: jnp.array(leaf.reshape(m, b * most, length)) for name, leaf in own.items()}


@cache
def wanted(model, dtype, examples=EXAMPLES, z_loss=0.0):
    decoder, shared, layers, batch = problem(model, dtype, examples)
    if model.startswith("packed"):  # the documents one by one, by a model without packing
        config = msgspec.structs.replace(decoder.config, attention="xla")
        decoder = replace(decoder, config=config).with_options(ops={"documents": 0})
        batch = with_neighbours(config, alone(batch))
    functions = decoder.with_options(loss={"z_loss": z_loss}).functions
    step = losses_and_gradients_ref(functions, shared, layers, batch, 1, functions.variables)
    return jax.device_get(step)


def pipeline_of(
    model, schedule, pp, dp, tp, *, cp=1, heads=0, slices=1, sequence=False, loss_chunks=1,
    z_loss=0.0, replicate=1, ep=1, over_tp=False, dtype=jnp.float32, examples=EXAMPLES,
    lockstep=PLAIN, **execution,
):  # fmt: skip
    """Return the pipeline on a mesh, its parameters as they are stored, and the batch.

    `over_tp`: the devices along tp of the `ep` replicas have different experts. `remat="ahead"` is
    full rematerialisation by actions of its own (R).
    """
    _, shared, layers, batch = problem(model, dtype, examples)
    built = build(schedule, pp=pp, microbatches=MICROBATCHES, slices=slices)
    if execution.get("remat") == "ahead":
        built, lockstep = recompute_ahead(built, Costs(R=1.0), replace(lockstep, pairs=False))
        execution["remat"] = "full"
    counts, kinds = (len(layers) // built.stages,) * built.stages, MODELS[model].layer_kinds
    layout = StageLayout(counts, built.placement, kinds, execution.get("unroll_layers"))
    devices = TensorParallel(tp, sequence) if tp > 1 else ONE_DEVICE
    factors = ReplicaFactors(rp=replicate, ep=ep)
    mesh = make_mesh(pp, dp, tp, devices=jax.devices()[: pp * dp * tp], factors=factors)
    of_ends = VocabularyParallel.of(devices, pp) if lockstep.vocab_parallel else None
    shards = ContextParallel(cp, heads) if cp > 1 else FULL_SEQUENCE
    sharers = ep * tp if over_tp else ep
    config, parts = MODELS[model], 2 if execution.get("overlap_halves") == "sequence" else 1
    decoder = FAMILIES[config.family].build(
        config,
        sharing=Sharing(
            devices, of_ends, shards, slices * parts,
            ExpertParallel(sharers, over_tp=over_tp) if sharers > 1 else ALL_EXPERTS,
        ),
        ops=packing_of(model),
        loss=Loss(loss_chunks, z_loss),
    )  # fmt: skip
    batch = shard_batch(batch, slices=slices, cp=cp, dp=dp, heads=heads)
    execution = Execution(lockstep, **execution)
    pipeline = Pipeline(decoder.functions, built, mesh, layout.layers_per_stage, execution)
    params = pipeline.sharding.pad({"embed_head": shared, "layers": layout.stack(layers)})
    return pipeline, layout, params, batch


def run(model, *args, dtype=jnp.float32, examples=EXAMPLES, z_loss=0.0, **how):
    """Return `(got, want)` of a step on a mesh and on one device."""
    pipeline, layout, params, batch = pipeline_of(
        model, *args, dtype=dtype, examples=examples, z_loss=z_loss, **how
    )
    variables = problem(model, dtype, examples)[0].functions.variables
    of_slices, got = jax.jit(pipeline.losses_and_gradients)(params, batch, variables)
    losses, gradients = wanted(model, dtype, examples, z_loss)
    gradients = gradients | {"layers": layout.stack(gradients["layers"])}
    of_microbatches = of_slices.reshape(MICROBATCHES, -1, *losses.shape[1:]).sum(1)
    return (of_microbatches, got), (
        losses,
        pipeline.sharding.pad(gradients),
    )


def without_key_biases(made):
    """Remove gradients of key biases, which are only rounding: a softmax is invariant to them."""
    losses, gradients = made
    layers = []
    for layer in gradients["layers"]:
        attn = dict(layer["attn"])
        assert jnp.abs(attn.pop("bk")).max() < 1e-15 * jnp.linalg.norm(attn["bv"])
        layers.append({**layer, "attn": attn})
    return losses, {**gradients, "layers": tuple(layers)}
