"""Storage that fails for a while: the run waits, and computes what a quiet run computes.

Disks fail in a file that Python imports before anything else: calls by which the run reads its
data, writes saves and logs raise errors for as long as a file exists. Time passes faster, so that
outages of 10 to 120 seconds take a tenth of that.
"""

import json

import pytest
from commands import complete, losses, train_command
from object_store import BUCKET, client, keys, read, s3_server
from outages import Disk, Store
from several import REPOSITORY, ends, start_all, wait_for_step

from jaxpipe.data.__main__ import main as data

TEN = [  # seconds, part of the path, error, process (None: all)
    (10, "tokens", "EIO", "1"), (20, "checkpoints", "ESTALE", None),
    (30, "tokens", "ESTALE", None), (30, "metrics", "EIO", None),
    (60, "checkpoints", "ETIMEDOUT", "2"), (120, "tokens", "ETIMEDOUT", "3"),
    (90, "checkpoints", "EREMOTEIO", None), (40, "run", "ENOTCONN", "0"),
    (60, "tokens", "ESHUTDOWN", "0"), (20, "exports", "EIO", None),
]  # fmt: skip
STORED = [  # the same of a run in a store, after the first: where, then as above
    ("disk", 10, "copies", "EIO", "1"), ("store", 20, "/checkpoints/", 503, None),
    ("store", 30, "/metrics.jsonl", 503, None), ("disk", 30, "copies", "ESTALE", "2"),
    ("store", 30, "/checkpoints/", 403, None), ("disk", 20, "metrics", "EIO", "0"),
    ("store", 60, "/run", "silence", None), ("disk", 120, "copies", "ETIMEDOUT", "3"),
    ("store", 120, "/checkpoints/", "silence", None), ("store", 40, "/exports/", 403, None),
]  # fmt: skip


@pytest.fixture
def tokens(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for path in (REPOSITORY / "jaxpipe" / "schedule").glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    words = ["prepare", str(folder), "--tokenizer", "bytes", "--workers", "1"]
    assert data([*words, "--out", str(tmp_path / "tokens")]) == 0
    return tmp_path / "tokens"


def command(tokens, directory, steps, *more):
    settings = [
        "data.source=file", f"data.path={tokens}", f"train.steps={steps}", "checkpoint.every=20",
        "train.eval_every=50", "log.tensorboard=false", "parallel.pp=2", "parallel.dp=2",
        f"checkpoint.export_every={steps}",
    ]  # fmt: skip
    return train_command(directory, *settings, *more, devices=1)


def run_with_outages(tmp_path, tokens, outages, faster, steps):
    disk = Disk(tmp_path, faster)
    quiet, run = tmp_path / "quiet", tmp_path / "run"
    more = ["checkpoint.keep=1000"]
    assert [code for code, _ in ends(start_all(4, command(tokens, quiet, steps, *more)), 600)] == [
        0
    ] * 4
    group = start_all(4, command(tokens, run, steps, *more), disk.environment)
    try:
        for number, outage in enumerate(outages):
            wait_for_step(run, 5 + 20 * number)
            disk.fail_for(*outage)
        found = ends(group, 600)
    finally:
        for process in group:
            process.kill()
    assert [code for code, _ in found] == [0] * 4, "\n".join(output for _, output in found)
    assert losses(run) == losses(quiet)
    assert complete(run)[-1] == steps
    assert (run / "exports" / str(steps) / "config.json").exists()
    return found


@pytest.mark.slow
def test_ten_outages_change_nothing(tmp_path, tokens):
    found = run_with_outages(tmp_path, tokens, TEN, 10, 220)
    assert "does not answer" in "".join(output for _, output in found)


@pytest.mark.slow
def test_eleven_outages_of_a_store_and_of_disks_change_nothing(tmp_path, tokens):
    """Data are copied from a store, whose copies are on disks; logs, saves, exports go to it."""
    steps, server = 220, s3_server()
    quiet, folder = tmp_path / "quiet", tmp_path / "cache/jaxpipe/runs"
    assert [code for code, _ in ends(start_all(4, command(tokens, quiet, steps)), 600)] == [0] * 4
    for path in tokens.iterdir():
        client(server).upload_file(str(path), BUCKET, f"outages/data/{path.name}")
    disk, store = Disk(tmp_path, 10), Store(server, 10)
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    at = f"s3://{BUCKET}/outages"
    store.fail("/outages/data", 503)
    words = command(f"{at}/data", f"{at}/run", steps)
    group = start_all(4, words, store.environment | disk.environment | own)
    try:
        store.fail_for(20, "/outages/data", 503)
        for number, (where, *outage) in enumerate(STORED):
            (local,) = folder.glob("run-*")
            wait_for_step(local / "0", 5 + 20 * number)
            (disk if where == "disk" else store).fail_for(*outage)
        found = ends(group, 600)
    finally:
        store.close()
        for process in group:
            process.kill()
    assert [code for code, _ in found] == [0] * 4, "\n".join(output for _, output in found)
    logged = map(json.loads, read(server, "outages/run/metrics.jsonl").splitlines())
    assert {line["step"]: line["loss"] for line in logged} == losses(quiet)
    there = keys(server, "outages/run/")
    assert f"outages/run/checkpoints/{steps}/commit_success.txt" in there
    assert f"outages/run/exports/{steps}/config.json" in there


@pytest.mark.slow
def test_an_outage_in_real_time(tmp_path, tokens):
    outages = [(30, "tokens", "ESTALE", "1"), (30, "checkpoints", "EIO", None)]
    run_with_outages(tmp_path, tokens, outages, 1, 60)


@pytest.mark.slow
@pytest.mark.parametrize(("error", "code"), [("ESTALE", 7), ("ENOENT", 2)])
def test_data_that_stay_away_stop_all_processes_with_the_state_saved(tmp_path, tokens, error, code):
    disk, run = Disk(tmp_path, 30), tmp_path / "run"
    group = start_all(4, command(tokens, run, 10**6, "checkpoint.every=0"), disk.environment)
    wait_for_step(run, 10)
    disk.fail("tokens", error, "2")
    found = ends(group, 300)
    outputs = "\n".join(output for _, output in found)
    assert [end for end, _ in found] == [code] * 4, outputs
    (saved,) = complete(run)
    assert saved >= 10
    assert max(losses(run)) == saved
    assert "does not answer" in outputs or error == "ENOENT"
