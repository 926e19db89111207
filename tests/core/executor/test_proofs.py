"""What the comparisons detect: NaN, small errors, and tables that point to the wrong slot.

For every schedule one program is compiled whose tables are an argument; each fault is planted in
the tables separately.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, assert_same
from orders import near
from toy import TOY, toy_batch, toy_params

from jaxpipe.core.executor import Execution, Pipeline, losses_and_gradients_ref
from jaxpipe.core.mesh import StageLayout, make_mesh
from jaxpipe.core.schedule import ORDERS

PP = 4
TREE = {"first": np.linspace(1, 2, 50), "second": np.linspace(3, 4, 50)}


def test_equal_trees_are_the_same():
    assert_same(TREE, TREE)


@pytest.mark.parametrize("leaf", TREE)
def test_nan_in_any_leaf_is_seen_and_named(leaf):
    poisoned = {name: value.copy() for name, value in TREE.items()}
    poisoned[leaf][7] = np.nan
    with pytest.raises(AssertionError, match=leaf):
        assert_same(poisoned, TREE)
    with pytest.raises(AssertionError, match=leaf):
        assert_close((0.0, poisoned), (0.0, TREE))


def test_an_error_that_cal_diff_lets_pass_is_seen():
    wrong = TREE | {"second": TREE["second"] + 4.5e-7 * np.sign(np.sin(np.arange(50)))}
    with pytest.raises(AssertionError, match=r"second.*relative"):
        assert_same(wrong, TREE)


def test_another_shape_is_seen():
    with pytest.raises(AssertionError):
        assert_same(TREE | {"first": np.ones((50, 1))}, TREE)


class Planted:
    """One schedule's step with its tables as an argument, and its expected result."""

    def __init__(self, name):
        schedule = near(name, PP, 6)
        counts = (1,) * schedule.stages
        layout = StageLayout(counts, schedule.placement)
        shared, layers = toy_params(0, layout.layers, jnp.float64)
        batch = toy_batch(1, schedule.microbatches, 2)
        mesh = make_mesh(PP, devices=jax.devices()[:PP])
        execution = Execution(poison_bubbles=True)
        pipeline = Pipeline(TOY, schedule, mesh, counts, execution)
        params = {"embed_head": shared, "layers": layout.stack(layers)}
        losses, gradients = losses_and_gradients_ref(TOY, shared, layers, batch)
        self.want = losses, gradients | {"layers": layout.stack(gradients["layers"])}
        self.tables = pipeline.tables

        program = jax.jit(pipeline._program(self.tables, params))
        self.step = lambda columns: program(params, batch, (None, None), columns)[:2]

    def seen(self, fault, ranks):
        """Return whether the comparison fails."""
        try:
            self.check(fault, ranks)
        except AssertionError:
            return True
        return False

    def check(self, fault=None, ranks=slice(None)):
        """Compare with the reference after a fault in the columns of some ranks."""
        columns = jax.tree.map(np.array, self.tables.columns)
        if fault:
            fault(self.tables, jax.tree.map(lambda column: column[:, ranks], columns))
            changed = jax.tree.map(np.not_equal, columns, self.tables.columns)
            if not any(map(np.any, jax.tree.leaves(changed))):
                raise RuntimeError(f"{fault.__name__} changed nothing")
        assert_same(self.step(columns), self.want)


def _rolled(column, used, count):
    column[used] = (column[used] + 1) % count


def forward_microbatches(tables, columns):
    _rolled(columns.forward_mb, columns.F > 0, columns.forward_mb.max() + 1)


def gradient_microbatches(tables, columns):
    used = (columns.B > 0) | (columns.W > 0) | (columns.BW > 0)
    _rolled(columns.gradient_mb, used, columns.gradient_mb.max() + 1)


def weights_of_a_poisoned_slot(tables, columns):
    """W reads an empty slot; in schedules without a separate W, BW does."""
    if tables.slots.stash:
        columns.stash_read[columns.W > 0] = tables.slots.stash
    else:
        columns.for_w_read[columns.BW > 0] = tables.slots.for_w


def inputs_of_another_slot(tables, columns):
    """B reads the slot of another microbatch, or an empty one."""
    used = (columns.B > 0) | (columns.BW > 0)
    _rolled(columns.for_b_read, used, tables.slots.for_b + 1)


def messages_stored_late(tables, columns):
    """The last permute direction's messages are stored one tick after they arrive."""
    columns.arrive[-1][1:] = columns.arrive[-1][:-1].copy()


def weights_left_out(tables, columns):
    """One rank computes one gradient of its weights less."""
    _leave_out(columns.W if columns.W.any() else columns.BW)


def inputs_left_out(tables, columns):
    """One rank computes one gradient of its input less."""
    _leave_out(columns.B if columns.B.any() else columns.BW)


def _leave_out(column):
    column[(column > 0).argmax(axis=0)] = 0


FAULTS = [
    (forward_microbatches, slice(None)),
    (gradient_microbatches, slice(None)),
    (forward_microbatches, slice(1, PP - 1)),  # no rank with embedding or head
    (gradient_microbatches, slice(1, PP - 1)),
    (weights_of_a_poisoned_slot, slice(None)),
    (inputs_of_another_slot, slice(None)),
    (messages_stored_late, slice(None)),
    (weights_left_out, slice(1, 2)),
    (inputs_left_out, slice(1, 2)),
]


@pytest.mark.extended(unless=["zbv"])
@pytest.mark.slow(unless=["1f1b", "interleaved_zb", "zbv", "dualpipe"])
@pytest.mark.parametrize("name", ORDERS)
def test_planted_faults_are_seen(name):
    with jax.enable_x64(True):
        planted = Planted(name)
        planted.check()
        unseen = [fault.__name__ for fault, ranks in FAULTS if not planted.seen(fault, ranks)]
        assert not unseen


def test_what_comes_from_nobody_is_poison():
    """XLA sends the first rank zeros from its missing neighbour; using them as a dx is detected."""

    def from_nobody(tables, columns):
        up, down = columns.arrive
        up[:] = down
        down[:] = tables.slots.inbox

    with jax.enable_x64(True):
        planted = Planted("1f1b")
        columns = jax.tree.map(np.array, planted.tables.columns)
        from_nobody(planted.tables, jax.tree.map(lambda column: column[:, :1], columns))
        _, gradients = planted.step(columns)
    assert np.isnan(gradients["layers"][0]["up"]).any()
