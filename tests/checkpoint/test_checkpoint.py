"""Checkpoints across layouts, damage and other models."""

import itertools
import resource
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_states import layer, make_state, open_at
from commands import SMALL

from jaxpipe import config as configs
from jaxpipe.checkpoint import FORMAT, StateKeying, read_state
from jaxpipe.checkpoint import keying as keying_module
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.checkpoint.integrity import read_meta
from jaxpipe.checkpoint.listing import list_steps
from jaxpipe.checkpoint.orbax_port.handler import copy_to_host
from jaxpipe.config import ConfigError
from jaxpipe.runtime.group import Group
from jaxpipe.training.trainer import Trainer

DATA = Path(__file__).parents[1] / "data"


def test_a_save_that_fails_leaves_no_old_checkpoint_for_good(tmp_path):
    state, keying = make_state([2], width=4096)
    said, limits = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_at(tmp_path, keying, keep=2, say=said.append) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, {})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 2**10, limits[1]))  # as on a full disk
        try:
            checkpoints.save(3, state, {})
            checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert checkpoints.steps == [1, 2]
        checkpoints.save(4, state, {})
    assert len(said) == 1
    assert list_steps(tmp_path) == [2, 4]


def test_a_save_and_a_restore_compile_one_program_each(caplog):
    """The layer slots of parameters and both moments have the same shapes."""
    state, keying = make_state([3, 2, 2], dp=2)
    caplog.clear()
    with jax.log_compiles():
        keying.to_stage_stacked(keying.to_padded_keyed(state), state)
    messages = [record.getMessage() for record in caplog.records]
    compiled = [message.split()[1] for message in messages if message.startswith("Compiling ")]
    assert compiled == ["jit(_take_rows)", "jit(_stack_rows)"]


@pytest.mark.parametrize("unroll", [1, 4])
def test_a_save_takes_memory_on_the_devices_for_one_layer_at_a_time(monkeypatch, unroll):
    """Of runs with four layers or one, on two pipeline ranks."""
    how = ["model.n_layers=8", "parallel.pp=2", "parallel.dp=1", f"parallel.unroll_layers={unroll}"]
    trainer = Trainer.resolve(configs.load(SMALL, how), tuple(jax.devices()[:2]))
    state = trainer.init()
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params["layers"]))
    own, taken = set(), []

    def buffers(arrays):
        shards = [shard.data for array in arrays for shard in array.addressable_shards]
        return {shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}

    def copied(arrays):
        live = buffers(jax.live_arrays())
        taken.append(sum(live[one] for one in live.keys() - before - own))
        copies = copy_to_host(arrays)
        own.update(buffers(jax.tree.leaves(copies)))  # here they are the devices' buffers
        return copies

    before = buffers(jax.live_arrays()).keys()
    monkeypatch.setattr(keying_module, "copy_to_host", copied)
    keyed = StateKeying(trainer.layout, trainer.sharding).to_keyed(state)
    assert len(taken) == 3 * 4  # of parameters and two moments, the layers of both ranks
    assert max(taken) < 2.5 * layers / 4  # with those of the slot before
    assert not jax.tree.leaves(keyed)[-1].addressable_shards[0].data.is_deleted()


CHAIN = [[2, 2, 2, 1], [4, 3], [7], [3, 2, 2], [3, 1, 3], [1, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(("before", "after"), [*itertools.pairwise(CHAIN)])
@pytest.mark.parametrize("dp", [1, 2])
def test_any_layout_restores_into_any_other(tmp_path, before, after, dp):
    dp = min(dp, 8 // len(before), 8 // len(after))
    state, keying = make_state(before, dp=dp)
    with open_at(tmp_path, keying) as checkpoints:
        checkpoints.save(5, state, {"position": 40})
    like, other = make_state(after, dp=3 - dp if 2 * len(after) <= 8 else 1)
    with open_at(tmp_path, other) as checkpoints:
        restored, meta = checkpoints.restore(like, say=pytest.fail)
    assert (meta["position"], meta["step"]) == (40, 5)
    jax.tree.map(np.testing.assert_array_equal, restored, like)
    shardings = jax.tree.map(
        lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), restored, like
    )
    assert all(jax.tree.leaves(shardings))


@pytest.mark.versions
def test_keys_say_what_a_thing_is_and_plain_orbax_reads_them(tmp_path):
    state, keying = make_state([2, 1])
    with open_at(tmp_path, keying) as checkpoints:
        checkpoints.save(1, state, {})
    tree = ocp.StandardCheckpointer().restore(tmp_path / "1" / "state")
    assert sorted(tree["params"]) == ["embed_head", "layers"]
    assert sorted(tree["params"]["layers"]) == ["0", "1", "2"]
    np.testing.assert_array_equal(
        tree["params"]["layers"]["2"]["attn"]["wq"], layer(2)["attn"]["wq"]
    )
    assert tree["optimizer"][0]["mu"]["layers"]["2"]["attn"]["wq"].shape == (6, 4)


def test_a_checkpoint_of_format_1_restores_and_is_saved_as_format_2(tmp_path):
    """`data/checkpoint_format_1` was written by the code of that format, with this state."""
    path = DATA / "checkpoint_format_1" / "5"
    like, keying = make_state([1, 2])
    zeros = jax.tree.map(jnp.zeros_like, like)
    restored, meta = read_state(path, keying, zeros, say=pytest.fail, group=Group())
    assert (meta["format"], meta["step"], meta["position"]) == (1, 5, 40)
    jax.tree.map(np.testing.assert_array_equal, restored, like)
    stored = StoredCheckpoint(path)
    names = [("params", "embed_head", "norm"), ("params", "layers", "2", "attn", "wq")]
    assert {*names} < stored.leaves.keys()
    for got, want in zip(stored.read(names), (jnp.arange(5.0), layer(2)["attn"]["wq"])):
        np.testing.assert_array_equal(got, want)
    with open_at(tmp_path, keying) as checkpoints:
        checkpoints.save(6, restored, {})
    tree = ocp.StandardCheckpointer().restore(tmp_path / "6" / "state")
    assert sorted(tree["params"]) == ["embed_head", "layers"]
    assert read_meta(tmp_path / "6")["format"] == FORMAT == 2


def damage(directory):
    """Truncate every data file of a checkpoint."""
    files = [path for path in (directory / "state").rglob("*") if path.is_file()]
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(tmp_path):
    state, keying = make_state([2, 1])
    with open_at(tmp_path, keying) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state, {})
    damage(tmp_path / "3")
    said = []
    with open_at(tmp_path, keying) as checkpoints:
        restored, meta = checkpoints.restore(state, say=said.append)
        assert meta["step"] == 2
        assert "checkpoint 3 is damaged" in said[0]
        checkpoints.save(3, restored, {})  # the number is free again
    assert (tmp_path / "damaged-3").is_dir()
    with open_at(tmp_path, keying) as checkpoints:
        assert checkpoints.restore(state, say=pytest.fail)[1]["step"] == 3


def test_an_older_one_is_restored_without_loss_of_the_newer(tmp_path):
    """As a rollback does, which finds that it is damaged."""
    state, keying = make_state([2, 1])
    with open_at(tmp_path, keying) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state, {})
        assert checkpoints.restore(state, pytest.fail, last_step=2)[1]["step"] == 2
    for step in ("1", "2"):
        damage(tmp_path / step)
    with open_at(tmp_path, keying) as checkpoints:
        assert checkpoints.restore(state, lambda _: None, last_step=2) is None
        assert checkpoints.restore(state, pytest.fail)[1]["step"] == 3


def test_a_checkpoint_that_was_renamed_is_named(tmp_path):
    """Orbax would save no step before a later name."""
    state, keying = make_state([2, 1])
    with open_at(tmp_path, keying) as checkpoints:
        checkpoints.save(4, state, {})
    (tmp_path / "4").rename(tmp_path / "500")
    wrong = pytest.raises(ConfigError, match=r"500 is of step 4, .*: rename it to 4, or move")
    with open_at(tmp_path, keying) as checkpoints, wrong:
        checkpoints.restore(state, say=pytest.fail)
    (tmp_path / "500").rename(tmp_path / "4")
    with open_at(tmp_path, keying) as checkpoints:
        assert checkpoints.restore(state, say=pytest.fail)[1]["step"] == 4


def test_local_saves_are_asked_again_where_a_checkpoint_is_damaged(tmp_path):
    asked, state, keying = [], *make_state([2, 1])
    with open_at(tmp_path, keying) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, {})
    damage(tmp_path / "2")
    with open_at(tmp_path, keying) as checkpoints:
        checkpoints.local = SimpleNamespace(
            restore=lambda since, *_: asked.append(since), close=lambda _: None
        )
        assert checkpoints.restore(state, lambda _: None)[1]["step"] == 1
    assert asked == [2, 1]


def test_an_unfinished_save_is_ignored(tmp_path):
    state, keying = make_state([2, 1])
    with open_at(tmp_path, keying) as checkpoints:
        checkpoints.save(1, state, {})
    half = tmp_path / "2.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    (half / "state" / "manifest.ocdbt").write_bytes(b"half")
    with open_at(tmp_path, keying) as checkpoints:
        assert checkpoints.steps == [1]


def test_nothing_to_restore(tmp_path):
    state, keying = make_state([2, 1])
    with open_at(tmp_path, keying) as checkpoints:
        assert checkpoints.restore(state, say=pytest.fail) is None


@pytest.mark.parametrize(
    ("counts", "width", "message"),
    [
        ([1, 1], 6, "layers/2/attn/wq has shape .*6, 4.* there and none"),
        ([2, 2], 6, r"layers/3/attn/wq has shape none \(absent\) there"),
        ([2, 1], 5, r"layers/0/attn/wq has shape \(6, 4\) there and \(5, 4\)"),
    ],
)
def test_another_model_is_named_by_its_first_leaf(tmp_path, counts, width, message):
    state, keying = make_state([2, 1])
    with open_at(tmp_path, keying) as checkpoints:
        checkpoints.save(1, state, {})
    other, keying = make_state(counts, width=width)
    with open_at(tmp_path, keying) as checkpoints, pytest.raises(ConfigError, match=message):
        checkpoints.restore(other, say=pytest.fail)
    assert (tmp_path / "1").is_dir()


def test_keeps_the_latest(tmp_path):
    state, keying = make_state([2, 1])
    with open_at(tmp_path, keying, keep=2) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, state, {})
    with open_at(tmp_path, keying) as checkpoints:
        assert checkpoints.steps == [3, 4]


def test_a_leaf_of_another_kind_is_named(tmp_path):
    state, keying = make_state([2, 1])
    whole = state | {"params": jax.tree.map(lambda leaf: leaf.astype(jnp.int32), state["params"])}
    with open_at(tmp_path, keying) as checkpoints:
        checkpoints.save(1, whole, {})
    with (
        open_at(tmp_path, keying) as checkpoints,
        pytest.raises(
            ConfigError, match="params/embed_head/embed has dtype int32 there and float32 in"
        ),
    ):
        checkpoints.restore(state, say=pytest.fail)
