"""What jaxpipe uses of Orbax's undocumented parts, or replaces there, works with this version."""

import gc
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.checkpoint.orbax_port import stores
from jaxpipe.checkpoint.orbax_port.errors import suppress_orbax_errors
from jaxpipe.checkpoint.orbax_port.handler import (
    StateSave,
    UnpaddedArray,
    copy_to_host,
    make_state_handler,
)
from jaxpipe.checkpoint.orbax_port.manager import Manager
from jaxpipe.checkpoint.orbax_port.save_barrier import _CLOSING

pytestmark = pytest.mark.versions


def array():
    """Return an array over four devices, [12, 4], whose last two rows are padding."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    values = np.arange(48, dtype=np.float32).reshape(12, 4)
    values[10:] = 0
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec("i")))


def restored(directory):
    """Return what plain Orbax reads, without any class of jaxpipe."""
    how = {"x": ocp.RestoreArgs(restore_type=np.ndarray)}
    return ocp.PyTreeCheckpointer().restore(directory, restore_args=how)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("unpadded", [False, True])
def test_proxies_of_arrays_are_written_as_arrays(tmp_path, on_host, unpadded):
    x = array()
    want = np.asarray(x)[:10] if unpadded else np.asarray(x)
    saved = copy_to_host({"x": x})["x"] if on_host else x
    saved = UnpaddedArray(saved, (10, 4)) if unpadded else saved
    with ocp.Checkpointer(make_state_handler()) as checkpointer:
        checkpointer.save(tmp_path / "state", args=StateSave({"x": saved}))
    np.testing.assert_array_equal(restored(tmp_path / "state")["x"], want)
    assert (tmp_path / "state" / "checksums.xxh128").exists()


class Barrier:
    """Records the places of saves, and the checkpoints that were complete there."""

    def __init__(self, directory):
        self._directory, self.places, self.complete = directory, [], []

    def __call__(self, *, key, timeout_ms):
        assert timeout_ms == 100_000
        self.places.append(key.rpartition(":")[2].partition(".")[0])
        self.complete.append(sorted(path.name for path in self._directory.glob("[0-9]")))


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_ends_at_the_barrier_by_which_a_failure_is_known(tmp_path, monkeypatch, fails):
    """`SaveBarrier` takes the second start of a set value for the end of a save."""
    barrier, handler = Barrier(tmp_path), make_state_handler()
    options = ocp.CheckpointManagerOptions(
        async_options=ocp.AsyncOptions(timeout_secs=100, barrier_sync_fn=barrier), create=False
    )
    if fails:

        def fail(*_):
            raise OSError("no space left")

        monkeypatch.setattr(handler, "finalize", fail)
    with Manager(tmp_path, options=options, item_handlers={"state": handler}) as manager:
        assert not manager.reached_preemption(1)
        manager.save(1, args=ocp.args.Composite(state=StateSave({"x": jnp.ones(4)})))
        if fails:
            with pytest.raises(OSError, match="no space left"):
                manager.wait_until_finished()
        else:
            manager.wait_until_finished()
    assert barrier.places == ["set_value_start", "set_value_end"] * 2
    assert _CLOSING == "set_value_start 2"
    assert barrier.complete[:2] == [[], []]
    assert barrier.complete[2:] == ([[], []] if fails else [["1"], ["1"]])


@pytest.fixture
def taught(monkeypatch):
    """Orbax with what `use_store_of` replaces, until the end of the test."""
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    if not hasattr(tensorstore_utils, "_use_gcs_driver"):
        pytest.skip("an older version, with which runs in stores are refused")
    for name in ("_GCS_PATH_PREFIX", "get_kvstore_for_gcs", "rmtree"):
        monkeypatch.setattr(gcs_utils, name, getattr(gcs_utils, name))
    for name in ("_use_gcs_driver", "_normalize_path"):
        monkeypatch.setattr(tensorstore_utils, name, getattr(tensorstore_utils, name))
    stores._teach_orbax.__wrapped__()
    return gcs_utils, tensorstore_utils


def test_orbax_takes_an_address_of_s3_for_a_store(taught, monkeypatch):
    gcs_utils, tensorstore_utils = taught
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:1")
    assert gcs_utils.is_gcs_path(epath.Path("s3://bucket/run"))
    spec = tensorstore_utils.build_kvstore_tspec("s3://bucket/run/1", "x", use_ocdbt=False)
    assert (spec["driver"], spec["bucket"], spec["path"]) == ("s3", "bucket", "run/1/x/")
    assert spec["endpoint"] == "http://localhost:1"
    nested = tensorstore_utils.build_kvstore_tspec("s3://bucket/run/1", "x", use_ocdbt=True)
    assert "s3" in str(nested)
    assert "file" in str(tensorstore_utils.build_kvstore_tspec("/run/1", "x", use_ocdbt=False))


def test_a_checkpoint_in_a_store_loses_its_commit_first(taught, monkeypatch):
    gcs_utils, _ = taught
    removed = []

    class Folder:
        def __truediv__(self, name):
            return type("File", (), {"unlink": lambda _, missing_ok: removed.append(name)})()

    with pytest.raises(Exception):  # noqa: B017, PT011 - Orbax's own then finds no folder of Google
        gcs_utils.rmtree(Folder())
    assert removed == ["commit_success.txt"]


def test_errors_that_orbax_also_raises_are_not_printed(caplog, capsys):
    suppress_orbax_errors()
    log = logging.getLogger("absl")

    def note(level, path, text):
        log.handle(log.makeRecord("absl", level, path, 1, text, (), None))

    with caplog.at_level(logging.INFO, "absl"):
        note(logging.ERROR, "/site-packages/orbax/thread.py", "it has failed")
        note(logging.ERROR, "/site-packages/other.py", "a failure of its own")
        note(logging.WARNING, "/site-packages/orbax/thread.py", "a warning")
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["a failure of its own", "a warning"]

    class Closed:
        def __del__(self):
            raise RuntimeError("Event loop is closed")

    Closed()
    gc.collect()
    assert "Event loop is closed" not in capsys.readouterr().err
    assert sys.unraisablehook is not sys.__unraisablehook__
