"""A plan counts what each optimizer keeps on a device, whatever the shapes of its state."""

from math import prod

import jax
import pytest
from commands import SMALL

from jaxpipe import config as configs
from jaxpipe.core.mesh import stage_stacked_trees
from jaxpipe.optimizer import KINDS
from jaxpipe.planning import rank_bytes
from jaxpipe.training.trainer import Trainer

# Adafactor factors matrices of at least 128 x 128; three replicas divide none of these sizes.
SIZES = ["model.d_model=128", "model.d_ff=160", "model.n_layers=3"]
OWN = ["own_optimizers:shampoo", "own_optimizers:eight_bit"]


def trainer_of(name, zero_stage, dp=3):
    mesh = ["parallel.pp=2", f"parallel.dp={dp}", f"parallel.zero_stage={zero_stage}"]
    how = [*mesh, f"optimizer.name={name}", "optimizer.decay=constant"]
    return Trainer.resolve(configs.load(SMALL, [*SIZES, *how]), tuple(jax.devices()[: 2 * dp]))


def of_parameters(state):
    """Return the leaves of the trees like the parameters: counts belong to no parameter."""
    return jax.tree.leaves(stage_stacked_trees(state))


def planned(trainer):
    return rank_bytes(trainer.config, trainer.layout, None).optimizer


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", [*KINDS, *OWN])
def test_bytes_are_those_of_the_state(name, zero_stage):
    trainer = trainer_of(name, zero_stage)
    held = zip(
        of_parameters(trainer.state_shapes.optimizer),
        of_parameters(trainer.state_shardings.optimizer),
    )
    assert planned(trainer) == sum(
        prod(how.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, how in held
    )


@pytest.mark.parametrize("name", ["adafactor", *OWN])
def test_every_device_has_as_many(name):
    """Of a real state, which ZeRO shards."""
    trainer = trainer_of(name, 1, dp=2)
    state = trainer.init()
    for device in trainer.mesh.devices.flat:
        shards = [
            shard.data.nbytes
            for leaf in of_parameters(state.optimizer)
            for shard in leaf.addressable_shards
            if shard.device == device
        ]
        assert sum(shards) == planned(trainer)
    assert planned(trainer) < planned(trainer_of(name, 0, dp=2))
