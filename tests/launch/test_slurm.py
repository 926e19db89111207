"""launch/slurm.sbatch on a real Slurm of two nodes: what becomes of a job in every situation."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import CPUS_PER_NODE, NODES, running_cluster, wait_for, why_not

ROOT = Path(__file__).parents[2]
REASON = why_not()
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
ENDLESS = 10**6  # steps
UP_TO_A_STEP = 120  # seconds; four processes that start on one busy core take 40


@pytest.fixture(scope="module")
def cluster():
    with running_cluster() as started:
        yield started


@pytest.fixture
def checkout(tmp_path):
    """A fresh clone, with spaces in its name, and a .venv that has this Python's packages."""
    root = tmp_path / "fresh clone"
    for name in ("launch", "jaxpipe", "tests/data"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(ROOT / name)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return root


class Job:
    """A submitted job that trains the small model with one device per task."""

    def __init__(self, cluster, root, *options, tasks=1, steps=ENDLESS, settings=()):
        self.cluster, self.root, self.run = cluster, root, root / "runs" / "own run"
        layout = (f"parallel.dp={tasks}", "parallel.pp=2", "runtime.cpu_devices=1")
        words = (
            "--nodes=2", f"--ntasks-per-node={tasks}", "--gpus-per-node=0", "--cpus-per-task=1",
            *options, "launch/slurm.sbatch", "tests/data/small.toml", *layout,
            f"train.steps={steps}", "train.eval_every=0", f"run.dir={self.run}",
            "checkpoint.every=0", *settings,
        )  # fmt: skip
        self.id = cluster.command("sbatch", "--parsable", *words, cwd=root).strip()

    @property
    def log(self):
        path = self.root / f"slurm-{self.id}.log"
        return path.read_text() if path.exists() else ""

    @property
    def state(self):
        return self.cluster.job(self.id)["JobState"]

    @property
    def restarts(self):
        return int(self.cluster.job(self.id)["Restarts"])

    @property
    def losses(self):
        """By step; of lines that are complete."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return {one["step"]: one["loss"] for one in found if "loss" in one}

    @property
    def saved(self):
        """Steps of the checkpoints."""
        folder = self.run / "checkpoints"
        names = os.listdir(folder) if folder.exists() else []
        return sorted(int(name) for name in names if name.isdigit())

    def wait_until_it_trains(self, after=2):
        self._wait(lambda: max(self.losses, default=0) > after, f"a step after {after}")

    def wait_until_it_ends(self, seconds=UP_TO_A_STEP):
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self._wait(lambda: self.state in ended, "the end", seconds)
        return self.state

    def check_it_was_requeued(self, seconds=60):
        """It saved and is queued again; return the step that it saved."""
        self._wait(lambda: self.restarts == 1, "it is requeued", seconds)
        assert self.state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        assert self.saved
        return self.saved[-1]

    def check_it_goes_on_after(self, step):
        """It trains on from that step, and losses are continued."""
        self.wait_until_it_trains(after=step)
        assert f"step {step}" in self.log.split("stopped after")[-1].split("\n", 1)[1], self.log
        assert sorted(self.losses) == list(range(1, max(self.losses) + 1))

    def cancel(self):
        self.cluster.command("scancel", self.id)
        self._wait(lambda: self.state == "CANCELLED", "CANCELLED", 60)
        self._wait(lambda: not self._in_queue(), "its tasks are gone", 60)

    def tasks(self):
        """Process ids of the trainers, in order of their start."""
        words = ["pgrep", "--full", f"jaxpipe.train .*run.dir={self.run}"]
        pids = map(int, subprocess.run(words, capture_output=True, check=False).stdout.split())
        mains = [pid for pid in pids if b"bash" not in _command(pid)]
        return sorted(mains)

    def _in_queue(self):
        return self.cluster.command("squeue", "--noheader", "--states=all", "--format=%t").count(
            "CG"
        )

    def _wait(self, condition, what, seconds=UP_TO_A_STEP):
        try:
            wait_for(condition, seconds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.cluster.job(self.id)}\n{self.log}") from None


def _command(pid):
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return b"bash"


@pytest.fixture
def submit(cluster, checkout):
    jobs = []

    def start(*options, **settings):
        jobs.append(Job(cluster, checkout, *options, **settings))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.state not in ("COMPLETED", "FAILED", "CANCELLED"):
            job.cancel()


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_fresh_clone_trains_to_the_end_and_has_a_log(submit, tasks):
    job = submit(tasks=tasks, steps=3)
    assert job.wait_until_it_ends() == "COMPLETED", job.log
    assert job.restarts == 0
    assert sorted(job.losses) == [1, 2, 3]
    assert "loss" in job.log
    assert not list(job.root.glob("*.stopped"))


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_signal_requeues_the_job_which_goes_on(submit, tasks):
    job = submit(tasks=tasks)
    job.wait_until_it_trains()
    job.cluster.command("scancel", "--signal=USR1", job.id)
    job.check_it_goes_on_after(job.check_it_was_requeued())


@pytest.mark.parametrize("options", ["USR1@30", "B:USR1@30", "B:TERM@30"])
def test_the_time_limit_requeues_the_job(submit, options):
    """Slurm signals up to a minute before it has to; B: the batch shell alone."""
    job = submit("--time=2", f"--signal={options}", tasks=2)
    job.wait_until_it_trains()
    job.check_it_was_requeued(seconds=150)


def test_a_preempted_job_comes_back(submit):
    job = submit(tasks=2)
    job.wait_until_it_trains()
    words = ("--partition=high", "--nodes=2", f"--ntasks-per-node={CPUS_PER_NODE}", "--wrap=true")
    job.cluster.command("sbatch", "--output=/dev/null", *words)
    job.check_it_goes_on_after(job.check_it_was_requeued())


def test_a_job_that_is_requeued_by_hand_is_requeued_once(submit):
    job = submit(tasks=2)
    job.wait_until_it_trains()
    job.cluster.command("scontrol", "requeue", job.id)
    step = job.check_it_was_requeued()
    job.check_it_goes_on_after(step)
    assert job.restarts == 1


def test_a_cancelled_job_saves_and_stays_cancelled(submit):
    job = submit(tasks=2)
    job.wait_until_it_trains()
    job.cancel()
    assert job.saved
    assert job.restarts == 0


def test_a_killed_task_ends_the_job(submit):
    job = submit(tasks=2)
    job.wait_until_it_trains()
    os.kill(job.tasks()[-1], signal.SIGKILL)
    assert job.wait_until_it_ends() == "FAILED"
    assert job.restarts == 0
    wait_for(lambda: not job.tasks(), 40, "the other tasks end")


def test_bad_input_ends_the_job(submit):
    job = submit(settings=["parallel.pp=9"])
    assert job.wait_until_it_ends() == "FAILED"
    assert job.cluster.job(job.id)["ExitCode"] == "2:0"
    assert job.restarts == 0
    assert "error: " in job.log


def test_a_clone_without_packages_is_told(submit, checkout):
    (checkout / ".venv" / "bin" / "python").unlink()
    job = submit()
    assert job.wait_until_it_ends() == "FAILED"
    assert job.cluster.job(job.id)["ExitCode"] == "2:0"
    assert "has no .venv/bin/python: call sbatch in the root of the repository" in job.log


def test_after_a_node_failure_the_job_goes_on(submit):
    job = submit(tasks=2, settings=["checkpoint.every=20"])
    job.wait_until_it_trains(after=40)
    job.cluster.kill_node(NODES[1])
    job._wait(lambda: job.restarts == 1, "it is requeued")
    saved, before = job.saved[-1], max(job.losses)
    job.cluster.start_nodes(NODES[1])
    job.wait_until_it_trains(after=before)
    assert saved <= before
    assert sorted(job.losses) == list(range(1, max(job.losses) + 1))
