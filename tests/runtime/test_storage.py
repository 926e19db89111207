"""Files in an object store, and the messages where one cannot be used."""

import contextlib
import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import SMALL
from object_store import BUCKET, clear, client, connect, keys, read, s3_server

from jaxpipe.config import ConfigError, load
from jaxpipe.data.__main__ import main as data
from jaxpipe.data.prepare import preparation as prepare
from jaxpipe.data.shards.token_files import find_prepared_folders, open_documents
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage import files as storage
from jaxpipe.runtime.storage import object_stores, remote_output
from jaxpipe.runtime.storage.directory import locked
from jaxpipe.runtime.storage.spool import Spool

ROOT = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def server():
    server = s3_server()
    clear(server)
    return server


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    return connect(server, tmp_path, monkeypatch)


def put(server, key, content=b"x"):
    client(server).put_object(Bucket=BUCKET, Key=key, Body=content)


def tokens_of(path):
    return int(open_documents(path, 256).lengths.sum())


@pytest.mark.extended
def test_a_folder_is_moved_and_removed_with_its_commit_first(store):
    for name in ("a/1/state/x", "a/1/commit_success.txt"):
        put(store, name)
    changes = []
    store.on_request = lambda method, _: method in ("PUT", "POST") and changes.append(method)
    storage.move_tree(storage.open_path(f"{ROOT}/a/1"), storage.open_path(f"{ROOT}/a/damaged-1"))
    assert changes == ["POST", "PUT", "POST"]  # removes the commit; copies; removes the rest
    assert keys(store, "a/") == ["a/damaged-1/state/x"]
    storage.remove_tree(storage.open_path(f"{ROOT}/a/damaged-1"))
    assert not keys(store, "a/")


def test_what_is_read_is_copied_once_until_it_changes(store):
    put(store, "tokens/a.bin", np.arange(9, dtype="<u2").tobytes())
    put(store, "tokens/a.json", b'{"dtype": "uint16"}')
    put(store, "tokens/ab.bin", b"\0\0")
    for name in ("tokens/a.bin", "tokens/a.*", "tokens/a"):
        assert tokens_of(f"{ROOT}/{name}") == 9
    folder = storage.local_copy(f"{ROOT}/tokens")
    assert storage.list_files(folder) == ["a.bin", "a.json", "ab.bin"]
    read = []
    store.on_request = lambda method, path: read.append(path) if path.endswith(".bin") else None
    assert storage.local_copy(f"{ROOT}/tokens/") == folder
    assert not [path for path in read if "tokens/a" in path]
    put(store, "tokens/a.bin", b"\1\0" * 8)
    assert tokens_of(f"{ROOT}/tokens/a.bin") == 8
    with pytest.raises(ConfigError, match=r"tokens/c.bin does not exist"):
        storage.local_copy(f"{ROOT}/tokens/c.bin")


def test_text_is_prepared_from_a_store_to_a_store(store, capsys):
    put(store, "texts/a.txt", b"some text")
    command = ["prepare", f"{ROOT}/texts", "--tokenizer", "bytes", "--out", f"{ROOT}/prepared"]
    order = []
    store.on_request = lambda method, path: order.append(path) if method == "PUT" else None
    assert data([*command, "--workers", "1"]) == 0
    assert order[-1].endswith("prepared/manifest.json")
    assert tokens_of(f"{ROOT}/prepared") == 10  # with the end of the document
    assert "prepared/unfinished.jsonl" not in keys(store)
    capsys.readouterr()
    order.clear()
    assert data([*command, "--workers", "1"]) == 0  # as for a folder on a disk
    assert "1 documents, 10 tokens in 1 shards" in capsys.readouterr().out
    assert not [path for path in order if ".probe-" not in path]
    put(store, "other/a.txt", b"a file of somebody")
    command[-1] = f"{ROOT}/other"
    assert data([*command, "--workers", "1"]) == 2
    assert f"{ROOT}/other exists and is not empty" in capsys.readouterr().err


def test_a_spool_begins_with_the_store_and_uploads_what_changes(store):
    put(store, "run/metrics.jsonl", b"old\n")
    put(store, "run/checkpoints/2/x")
    spool = Spool(f"{ROOT}/run", print, Group())
    with locked(spool.folder, print, Group()):
        (spool.folder / "stale").write_text("of a start that was killed")
        with spool:
            assert storage.list_files(spool.folder) == [".lock", "metrics.jsonl"]
            with (spool.folder / "metrics.jsonl").open("a") as file:
                file.write("new\n")
            puts = []
            store.on_request = lambda method, path: puts.append(path) if method == "PUT" else None
            spool.upload()
            spool.upload()
            assert puts == [f"/{BUCKET}/run/metrics.jsonl"]
            (spool.folder / "hangs").mkdir()
            (spool.folder / "hangs" / "x.txt").write_text("stack")
    assert read(store, "run/metrics.jsonl") == "old\nnew\n"
    assert keys(store, "run/hangs") == ["run/hangs/x.txt"]


def test_a_spool_without_a_lock_ignores_probes_of_other_processes(store):
    """Of several processes only the first has a lock; another's probe may vanish any time."""
    put(store, "several/starts.jsonl")
    store.on_request = lambda method, path: put_probe(store) if ".probe-" in path else None
    with Spool(f"{ROOT}/several", print, Group()) as spool:
        assert storage.list_files(spool.folder) == ["starts.jsonl"]


def put_probe(server):
    server.on_request = lambda method, path: None
    put(server, "several/.probe-of-another")


def test_on_a_disk_a_spool_is_the_run_directory(tmp_path):
    with Spool(str(tmp_path), print, Group()) as spool:
        (tmp_path / "file").write_text("kept")
    assert spool.folder == tmp_path
    assert (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [("run.dir=weird://b/x", "begins with weird://, but what holds checkpoints begins with gs://"),
     ("data.path=weird://b/x", "begins with weird://, which fsspec does not know"),
     ("run.dir=s3://", "names no bucket: give it as s3://BUCKET/FOLDER"),
     ("run.dir=s3:/b/x", "is no path and no address"),
     ("parallel.costs=s3://b/x", "is read and written on a disk only")],
)  # fmt: skip
def test_an_address_that_cannot_be_used_is_refused_when_it_is_read(setting, message):
    with pytest.raises(ConfigError) as refused:
        load(SMALL, [setting])
    assert message in str(refused.value)
    assert str(refused.value).startswith(setting.partition("=")[0])


def test_a_missing_package_is_named(monkeypatch):
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(ConfigError, match="not installed: pip install s3fs"):
        load(SMALL, ["run.dir=s3://bucket/run"])


@pytest.mark.extended
def test_no_bucket_and_no_credentials_are_one_sentence_each(store):
    def refusal(bucket, without=()):
        environment = {"PATH": "", "HOME": "/nonexistent", **store.environment}
        environment = {k: v for k, v in environment.items() if k not in without}
        ran = subprocess.run(
            [sys.executable, "-m", "jaxpipe.train", str(SMALL), f"run.dir=s3://{bucket}/run"],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
            env={**environment, "XDG_CACHE_HOME": storage.cache_folder("x"), "JAX_PLATFORMS": "cpu",
                 "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        )  # fmt: skip
        assert ran.returncode == 2, ran.stderr
        return ran.stderr

    said = refusal("nowhere")
    assert said.count("\n") == 1
    assert "there is no bucket 'nowhere'; create it" in said
    said = refusal(BUCKET, without=("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    assert said.count("\n") == 1
    assert "credentials" in said


class Killed(BaseException):
    pass


def test_a_copy_that_is_interrupted_goes_on_where_it_stopped(store, monkeypatch):
    """Files that are there stay, and a part of a file is not read again."""
    monkeypatch.setattr(object_stores, "_BLOCK", 1000)
    monkeypatch.setattr(object_stores, "_THREADS", 1)
    clear(store)
    contents = {f"tokens/{name}.bin": name.encode() * 3000 for name in "abc"}
    for name, content in contents.items():
        put(store, name, content)
    ranges = []

    def read(address, begin, end, real=object_stores._read):
        ranges.append((address[-5:], begin))
        if len(ranges) == 6:
            raise Killed
        return real(address, begin, end)

    monkeypatch.setattr(object_stores, "_read", read)
    with pytest.raises(Killed):
        storage.local_copy(f"{ROOT}/tokens")
    folder = storage.local_copy(f"{ROOT}/tokens")
    assert {f"tokens/{path.name}": path.read_bytes() for path in folder.iterdir()} == contents
    again = [one for one in ranges if ranges.count(one) > 1]
    assert again == [("b.bin", 2000), ("b.bin", 2000)]
    assert len(ranges) == 10


def test_an_outage_of_the_store_is_waited_out_by_a_copy(store, monkeypatch):
    put(store, "tokens/a.bin", b"a" * 100)
    failures = iter([TimeoutError("timed out"), OSError(errno.EBUSY, "SlowDown")])

    def read(address, begin, end, real=object_stores._read):
        if error := next(failures, None):
            raise error
        return real(address, begin, end)

    monkeypatch.setattr(object_stores, "_read", read)
    assert (storage.local_copy(f"{ROOT}/tokens") / "a.bin").read_bytes() == b"a" * 100


def test_a_store_that_does_not_answer_at_the_start_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failures = iter([TimeoutError(errno.ETIMEDOUT, "timed out")])

    def download(address, folder, is_wanted):
        if error := next(failures, None):
            raise error
        assert not is_wanted("checkpoints/2/x")
        (folder / "metrics.jsonl").write_text("old")

    monkeypatch.setattr(storage, "download", download)
    said = []
    spool = Spool("s3://bucket/run", said.append, Group())
    spool._begin()
    assert (spool.folder / "metrics.jsonl").read_text() == "old"
    assert "s3://bucket/run does not answer" in said[0]


def test_files_may_vanish_while_another_process_copies(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / name).write_bytes(b"x" * 10)

    def stat(path):
        if path.endswith("b"):
            raise FileNotFoundError(path)
        return os.stat(path)

    monkeypatch.setattr(object_stores, "os", SimpleNamespace(walk=os.walk, path=os.path, stat=stat))
    assert object_stores._bytes_below(tmp_path) == 20
    assert object_stores._bytes_below(tmp_path / "none") == 0


def test_only_the_files_that_are_named_are_copied(store):
    clear(store)
    put(store, "model/tokenizer.json", b"{}")
    put(store, "model/model.safetensors", b"w" * 1000)
    folder = storage.local_copy(f"{ROOT}/model", "tokenizer.json".__eq__)
    assert storage.list_files(folder) == ["tokenizer.json"]


def test_prepared_folders_are_described_without_their_tokens(store):
    clear(store)
    put(store, "texts/a.txt", b"some text")
    command = ["prepare", f"{ROOT}/texts", "--tokenizer", "bytes", "--out", f"{ROOT}/prepared"]
    assert data([*command, "--workers", "1"]) == 0
    (folder,) = find_prepared_folders(f"{ROOT}/prepared")
    copied = storage.list_files(folder)
    assert "manifest.json" in copied
    assert not [name for name in copied if name.endswith((".bin", ".idx"))]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_preparation_into_a_store_continues_after_a_kill(store, monkeypatch, tmp_path, where):
    """On the same machine and on another one; shards are in the store before the end."""
    clear(store)
    (tmp_path / "texts").mkdir()
    for name in "abcd":
        (tmp_path / f"texts/{name}.txt").write_text(name * 100)
    words = [
        "prepare",
        str(tmp_path / "texts"),
        "--tokenizer",
        "bytes",
        "--out",
        f"{ROOT}/prepared",
    ]
    words += ["--workers", "1", "--piece", "100B"]
    monkeypatch.setattr(remote_output, "_PERIOD", 0.05)
    synced, continued, real = [], [], prepare.open_journal

    def fsync(file):
        synced.append(file)
        if len(synced) == 2:
            end = time.monotonic() + 20
            while "prepared/unfinished.jsonl" not in keys(store) and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(0.5)
            raise Killed

    monkeypatch.setattr(prepare.os, "fsync", fsync)
    with pytest.raises(Killed):
        data(words)
    monkeypatch.undo()
    connect(store, tmp_path / where if where == "elsewhere" else tmp_path, monkeypatch)
    assert "prepared/000000.bin" in keys(store)
    assert "prepared/manifest.json" not in keys(store)

    @contextlib.contextmanager
    def noted(*arguments):
        with real(*arguments) as (file, done):
            continued.extend(done)
            yield file, done

    monkeypatch.setattr(prepare, "open_journal", noted)
    assert data(words) == 0
    assert 0 in continued
    assert tokens_of(f"{ROOT}/prepared") == 404
    assert "prepared/unfinished.jsonl" not in keys(store)
