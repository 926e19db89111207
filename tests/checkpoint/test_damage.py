"""Damaged checkpoints are never used, and only those proved damaged are moved aside."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import xxhash
from checkpoint_states import make_state, open_at
from commands import SMALL

from jaxpipe import train
from jaxpipe.checkpoint import DamagedError, integrity, read_state, restoring
from jaxpipe.checkpoint.__main__ import main as command
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.config import ConfigError
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage import errors as storage_errors

BY_ORBAX_ALONE = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # not read here


@pytest.fixture(scope="module")
def state_and_keying():
    return make_state([2, 1])


@pytest.fixture(scope="module")
def two(tmp_path_factory, state_and_keying):
    """Save checkpoints of step 2, whose parameters are negative, and step 3."""
    directory = tmp_path_factory.mktemp("two")
    state, keying = state_and_keying
    with open_at(directory, keying) as checkpoints:
        checkpoints.save(2, jax.tree.map(lambda leaf: -leaf, state), {"position": 2})
        checkpoints.save(3, state, {"position": 3})
    return directory


def read_files(step):
    """Return the files of a checkpoint that a reader depends on."""
    files = (path for path in step.rglob("*") if path.is_file())
    return sorted(path for path in files if path.name not in BY_ORBAX_ALONE)


def flip(path, place, bit):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.extended
def test_one_flipped_bit_anywhere_is_noticed(tmp_path, two, state_and_keying):
    """Several bits in every file: arrays, their index, the metadata, and the checksums."""
    state, keying = state_and_keying
    chance = random.Random(0)
    for index, path in enumerate(read_files(two / "3")):
        name, size = path.relative_to(two), path.stat().st_size
        for place in {0, size - 1, *(chance.randrange(size) for _ in range(4))}:
            bit = chance.randrange(8)
            step = tmp_path / f"{index}-{place}-{bit}"
            shutil.copytree(two / "3", step)
            flip(tmp_path / step.name / Path(*name.parts[1:]), place, bit)
            with pytest.raises(DamagedError):
                read_state(step, keying, state, group=Group())
            with pytest.raises(ConfigError, match="is damaged"):
                StoredCheckpoint(step).read([("params", "embed_head", "embed")])


def test_bits_flipped_where_only_orbax_looks_change_nothing(tmp_path, two, state_and_keying):
    state, keying = state_and_keying
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "3").rglob("*"):
        if path.name in BY_ORBAX_ALONE:
            flip(path, path.stat().st_size // 2, 3)
    with open_at(tmp_path, keying) as checkpoints:
        got, meta = checkpoints.restore(state, pytest.fail)
    assert meta["position"] == 3
    jax.tree.map(np.testing.assert_array_equal, got, state)


@pytest.mark.parametrize(
    "what", ["data", "checksums", "all checksums", "everything", "metadata", "truncated"]
)
def test_a_damaged_one_is_set_aside_and_the_one_before_taken(tmp_path, two, state_and_keying, what):
    state, keying = state_and_keying
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    arrays = tmp_path / "3" / "state"
    largest = max(arrays.rglob("d/*"), key=lambda path: path.stat().st_size)
    match what:
        case "data":
            largest.unlink()
        case "checksums":
            (arrays / "checksums.process_0.xxh128").unlink()
        case "all checksums":
            for path in arrays.glob("checksums*"):
                path.write_text("")
        case "everything":
            shutil.rmtree(arrays)
            arrays.mkdir()
        case "metadata":
            shutil.rmtree(tmp_path / "3" / "meta")
        case "truncated":
            os.truncate(largest, largest.stat().st_size - 1)
    (tmp_path / "damaged-3").mkdir()  # of an earlier time: it stays
    said = []
    with open_at(tmp_path, keying) as checkpoints:
        got, meta = checkpoints.restore(state, said.append)
    assert meta["position"] == 2
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, -b), got, state)
    [line] = said
    assert line.startswith("checkpoint 3 is damaged (")
    assert (tmp_path / "damaged-3-2" / "_CHECKPOINT_METADATA").exists()


def test_a_disk_that_hesitates_does_not_keep_a_damaged_one(
    tmp_path, two, state_and_keying, monkeypatch
):
    state, keying = state_and_keying
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "3" / "meta")
    errors = iter([OSError(errno.EIO, "Input/output error")])

    def exists(path, real=Path.exists):
        if path.name.startswith("damaged") and (error := next(errors, None)):
            raise error
        return real(path)

    said = []
    with open_at(tmp_path, keying) as checkpoints:
        monkeypatch.setattr(Path, "exists", exists)
        _, meta = checkpoints.restore(state, said.append)
    assert meta["position"] == 2
    assert next(errors, None) is None
    assert (tmp_path / "damaged-3").is_dir()


REASONS = [MemoryError("std::bad_alloc"), TypeError("an int, not a str"),
           OSError(errno.EIO, "Input/output error"), PermissionError(errno.EACCES, "denied"),
           ValueError("RESOURCE_EXHAUSTED: Out of memory")]  # fmt: skip


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: type(reason).__name__)
@pytest.mark.parametrize("where", ["arrays", "checksums"])
def test_what_shows_no_damage_stops_and_changes_nothing(
    tmp_path, two, state_and_keying, reason, where, monkeypatch
):
    state, keying = state_and_keying
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)

    def fail(*_, **__):
        raise reason

    place = (restoring, "_read_arrays") if where == "arrays" else (integrity, "checksum_of_file")
    monkeypatch.setattr(*place, fail)
    monkeypatch.setattr(storage_errors, "LIMIT", -1.0)  # two of the reasons are waited out
    with (
        open_at(tmp_path, keying) as checkpoints,
        pytest.raises(ConfigError, match="cannot be read .*nothing was changed"),
    ):
        checkpoints.restore(state, pytest.fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_a_directory_that_may_not_be_read_is_not_an_empty_one(
    tmp_path, two, state_and_keying, monkeypatch
):
    state, keying = state_and_keying
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    scandir = os.scandir

    def refuse(path="."):
        if str(path).endswith("state"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with open_at(tmp_path, keying) as checkpoints, pytest.raises(ConfigError, match="denied"):
        checkpoints.restore(state, pytest.fail)
    assert (tmp_path / "3").is_dir()


def without_checksums(step):
    """Convert a checkpoint to the form in which an earlier version saved it."""
    for path in (step / "state").glob("checksums*"):
        path.unlink()
    meta = step / "meta" / "metadata"
    saved = json.loads(meta.read_text())
    del saved["xxh3_128"]
    meta.write_text(json.dumps(saved))


@pytest.mark.parametrize("cut", [False, True])
def test_one_without_checksums_is_read_and_reported(tmp_path, two, state_and_keying, cut):
    """Without checksums, only data that cannot be decoded counts as damaged."""
    state, keying = state_and_keying
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    without_checksums(tmp_path / "3")
    if cut:
        for path in (tmp_path / "3" / "state").rglob("d/*"):
            os.truncate(path, path.stat().st_size // 2)
    said = []
    with open_at(tmp_path, keying) as checkpoints:
        _, meta = checkpoints.restore(state, said.append)
    assert "wrote no checksums: nothing proves" in said[0]
    assert meta["position"] == (2 if cut else 3)
    assert (tmp_path / "damaged-3").exists() == cut


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    assert train.main([str(SMALL), f"run.dir={directory}"]) == 0
    return directory


def damage(step):
    largest = max((step / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size // 2, 6)


def test_a_run_never_begins_anew_by_itself(tmp_path, run, capsys):
    shutil.copytree(run / "checkpoints" / "4", tmp_path / "checkpoints" / "4")
    damage(tmp_path / "checkpoints" / "4")
    words = [str(SMALL), f"run.dir={tmp_path}", "train.steps=3"]
    for _ in range(2):  # the second time it is moved aside already
        assert train.main(words) == 2
        error = capsys.readouterr().err
        assert (
            "holds no checkpoint but damaged-4: set checkpoint.resume=none to begin anew" in error
        )
        assert error.count("\n") == 1
    assert train.main([*words, "checkpoint.resume=none"]) == 0
    assert train.main(words) == 0  # from the new ones
    assert (tmp_path / "checkpoints" / "damaged-4").is_dir()


def test_every_reader_notices(tmp_path, run, capsys):
    step = tmp_path / "12"
    shutil.copytree(run / "checkpoints" / "12", step)
    assert command(["inspect", str(step)]) == 0
    assert "files are as they were saved" in capsys.readouterr().out
    damage(step)
    alone = "checkpoint.parameters_only=true"
    new = [str(SMALL), f"run.dir={tmp_path / 'new'}", f"checkpoint.resume={step}"]
    for read in (
        lambda: command(["inspect", str(step)]),
        lambda: command(["export", str(step), str(tmp_path / "out")]),
        lambda: train.main(new),
        lambda: train.main([*new, alone]),
    ):
        assert read() == 2
        error = capsys.readouterr().err
        assert f"{step} is damaged (state/ocdbt.process_0/d/" in error
        assert error.count("\n") == 1
    assert step.is_dir()  # it is not this run's own
    assert not (tmp_path / "out").exists()


def test_what_a_killed_or_failed_save_left_is_removed(tmp_path, two, state_and_keying):
    state, keying = state_and_keying
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    half = tmp_path / "5.orbax-checkpoint-tmp"
    shutil.copytree(two / "3", half)
    with open_at(tmp_path, keying) as checkpoints:
        assert not half.exists()
        shutil.copytree(two / "3", half)
        checkpoints.save(4, state, {})
        checkpoints.wait()
        assert not half.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "4"]


PLAIN = """
import sys
import jax, numpy as np, orbax.checkpoint as ocp
assert "jaxpipe" not in sys.modules
tree = ocp.StandardCheckpointer().restore(sys.argv[1])
manager = ocp.CheckpointManager(sys.argv[1].removesuffix("/3/state"))
other = manager.restore(3, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
reader = ocp.PyTreeCheckpointer()
saved = reader.metadata(sys.argv[1]).item_metadata.tree
to_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
third = reader.restore(sys.argv[1], restore_args=to_numpy)
for found in (tree, other, third):
    np.save(sys.stdout.buffer, np.asarray(found["params"]["layers"]["2"]["attn"]["wq"]))
"""


@pytest.mark.parametrize("devices", [1, 3])
def test_plain_orbax_reads_it_on_any_number_of_devices(tmp_path, two, devices):
    """As checkpoint/README.md shows; two devices saved it."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(two / "3" / "state")], capture_output=True, check=True,
        env=os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
        cwd=tmp_path,
    )  # fmt: skip
    (tmp_path / "out").write_bytes(done.stdout)
    want = 2 + np.arange(24.0).reshape(6, 4)
    with (tmp_path / "out").open("rb") as file:
        for _ in range(3):
            np.testing.assert_array_equal(np.load(file), want)


def test_the_checksums_are_those_of_a_common_program(two):
    """`xxhsum -c` reads lines of a checksum, two spaces and a path."""
    for path in (two / "3" / "state").glob("checksums*.xxh128"):
        for line in path.read_text().splitlines():
            checksum, name = line.split("  ")
            assert xxhash.xxh128((path.parent / name).read_bytes()).hexdigest() == checksum


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_file_is_compared_by_one_process(tmp_path, count):
    """With any number; with as many as saved, each compares the files that it wrote."""
    for name in ("manifest.ocdbt", *(f"ocdbt.process_{i}/d/{i}" for i in range(3))):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for process in (*range(3), None):
        integrity.write_checksums(tmp_path, process)
    shares = range(count)
    assert [integrity.check_files(tmp_path, i, count) for i in shares] == [4] * count
    for writer in range(3):
        path = tmp_path / f"ocdbt.process_{writer}" / "d" / str(writer)
        path.write_text("other")
        found = []
        for process in shares:
            try:
                integrity.check_files(tmp_path, process, count)
            except DamagedError:
                found.append(process)
        assert found == [writer % count]
        path.write_text(path.relative_to(tmp_path).as_posix())
