"""Storage that fails for a while: the run waits, and computes what a quiet run computes.

Disks fail in a file that Python imports before anything else: calls by which the run reads its
data, writes saves and logs raise errors for as long as a file exists. Time passes faster, so that
outages of 10 to 120 seconds take a tenth of that.
"""

import json
import time

import pytest
from commands import complete, losses, train_command
from several import REPOSITORY, ends, start_all, wait_for_step

from jaxpipe.data.__main__ import main as data

# Errors by the part of a path; `FASTER` seconds pass in one.
FAILING = """
import builtins, errno, io, json, os, pathlib, time
FLAG, FASTER = os.environ.get("OUTAGE"), float(os.environ.get("FASTER", "1"))

def fail(path):
    try:
        with real_open(FLAG) as file:
            wanted = json.loads(file.read())
    except (OSError, ValueError):
        return
    own = wanted["process"] in (os.environ.get("JAX_PROCESS_ID"), None)
    if own and wanted["part"] in str(path):
        code = getattr(errno, wanted["error"])
        raise OSError(code, os.strerror(code), str(path))

if FLAG:
    real_open, real_os_open, real_sleep = io.open, os.open, time.sleep
    def opened(path, *arguments, **options):
        if isinstance(path, (str, os.PathLike)) and str(path) != FLAG:
            fail(path)
        return real_open(path, *arguments, **options)
    io.open = builtins.open = opened
    import importlib.abc, sys
    class Hook(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name not in HOOKS:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            sys.meta_path.insert(0, self)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), HOOKS[name](module))
            return spec
    def of_tokens(module):
        class Numpy:
            def __getattr__(self, name):
                return getattr(real, name)
            def fromfile(self, path, *arguments, **options):
                fail(path)
                return real.fromfile(path, *arguments, **options)
        real, module.np = module.np, Numpy()
    def of_storage(module):
        real = module.probe
        def probe(directory):
            fail(directory)
            return real(directory)
        module.probe = probe
    def of_errors(module):
        module.LIMIT /= FASTER
        module._LONGEST_PAUSE /= FASTER
    HOOKS = {
        "jaxpipe.data.tokens": of_tokens, "jaxpipe.runtime.storage": of_storage,
        "jaxpipe.runtime.storage_errors": of_errors,
    }
    import importlib.util
    sys.meta_path.insert(0, Hook())
"""
TEN = [  # part of the path, error, seconds, process (None: all)
    ("tokens", "EIO", 10, "1"), ("checkpoints", "ESTALE", 20, None), ("tokens", "ESTALE", 30, None),
    ("metrics", "EIO", 30, None), ("checkpoints", "ETIMEDOUT", 60, "2"),
    ("exports", "EIO", 20, None), ("tokens", "ETIMEDOUT", 120, "3"),
    ("checkpoints", "EREMOTEIO", 90, None),
    ("run", "ENOTCONN", 40, "0"), ("tokens", "ESHUTDOWN", 60, "0"),
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


class Disk:
    """What tells the processes of a run which calls fail."""

    def __init__(self, folder, faster):
        self.flag, self._faster = folder / "outage", faster
        (folder / "sitecustomize.py").write_text(FAILING)
        self.environment = {
            "PYTHONPATH": f"{folder}:{REPOSITORY}", "OUTAGE": str(self.flag), "FASTER": str(faster)
        }  # fmt: skip

    def fail(self, part, error, process=None):
        fresh = self.flag.with_suffix(".new")
        fresh.write_text(json.dumps({"part": part, "error": error, "process": process}))
        fresh.replace(self.flag)

    def fail_for(self, part, error, seconds, process=None):
        self.fail(part, error, process)
        time.sleep(seconds / self._faster)
        self.flag.unlink()


def command(tokens, directory, steps, *more):
    settings = [
        "data.source=file", f"data.path={tokens}", f"train.steps={steps}", "checkpoint.every=20",
        "train.eval_every=50", "log.tensorboard=false", "parallel.pp=2", "parallel.dp=2",
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
    for number, (part, error, seconds, process) in enumerate(outages):
        wait_for_step(run, 5 + 20 * number)
        disk.fail_for(part, error, seconds, process)
    found = ends(group, 600)
    assert [code for code, _ in found] == [0] * 4, "\n".join(output for _, output in found)
    assert losses(run) == losses(quiet)
    assert complete(run)[-1] == steps
    return found


@pytest.mark.slow
def test_ten_outages_change_nothing(tmp_path, tokens):
    found = run_with_outages(tmp_path, tokens, TEN, 10, 220)
    assert "does not answer" in "".join(output for _, output in found)


@pytest.mark.slow
def test_an_outage_in_real_time(tmp_path, tokens):
    outages = [("tokens", "ESTALE", 30, "1"), ("checkpoints", "EIO", 30, None)]
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
