"""launch/slurm.sbatch on a real Slurm of two nodes: the outcome of a job in every situation.

Each situation is tried with a stand-in for the trainer, which takes a second; those in which
processes depend on each other are also tried with a real training run.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import CPUS_PER_NODE, NODES, running_cluster, wait_for, why_not

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parents[1] / "support" / "stand_in.py"
REASON = why_not()
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
ENDLESS = 10**6  # steps
PATIENCE = 300  # seconds; four trainings that start on one busy core take 100
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster():
    with running_cluster() as started:
        yield started


@pytest.fixture(params=["stand_in", pytest.param("training", marks=pytest.mark.slow)])
def checkout(tmp_path, request):
    """Return a fresh clone, with a space in its name, and a .venv with this Python's packages."""
    root = tmp_path / "fresh clone"
    for name in ("launch", "jaxpipe", "tests/data"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(ROOT / name)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    program = {"stand_in": f'"{STAND_IN}" "${{@:2}}"', "training": '"$@"'}[request.param]
    other = f'[[ $2 == jaxpipe.train ]] || exec "{sys.executable}" "$@"'
    python.write_text(f'#!/usr/bin/env bash\n{other}\nexec "{sys.executable}" {program}\n')
    python.chmod(0o755)
    return root


only_stand_in = pytest.mark.parametrize("checkout", ["stand_in"], indirect=True)


def stand_in_and_training(tasks):
    """The stand-in with one and two tasks per node, and a training with as many as are given."""
    training = pytest.param(tasks, "training", marks=pytest.mark.slow)
    cases = [(1, "stand_in"), (2, "stand_in"), training]
    return pytest.mark.parametrize(("tasks", "checkout"), cases, indirect=["checkout"])


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
        """Losses by step, from complete lines."""
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

    @property
    def tasks(self):
        """Process ids of the trainers, without the shells that wait for them."""
        words = ["pgrep", "--full", f"^{sys.executable} .*run.dir={self.run}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return sorted(map(int, done.stdout.split()))

    def wait_until_it_trains(self, after=2):
        trained = lambda: max(self.losses, default=0) > after  # noqa: E731
        self.wait(lambda: trained() or self.state in ENDED, f"a step after {after}")
        assert trained(), self.log

    def wait_until_it_ends(self):
        self.wait(lambda: self.state in ENDED, "the end")
        return self.state

    def wait_until_it_is_requeued(self):
        """Wait, and return the step that was saved."""
        self.wait(lambda: self.restarts == 1 and self.saved, "it is saved and requeued")
        assert self.state not in ENDED
        return self.saved[-1]

    def check_it_goes_on_after(self, step):
        """Check that it resumed from that step, and that its losses continue."""
        self.wait_until_it_trains(after=step)
        assert f"resumed from step {step}" in self.log
        assert sorted(self.losses) == list(range(1, max(self.losses) + 1))

    def cancel(self):
        self.cluster.command("scancel", self.id)
        self.wait(lambda: self.state == "CANCELLED" and not self.tasks, "its tasks are gone")

    def wait(self, condition, what):
        try:
            wait_for(condition, PATIENCE, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.cluster.job(self.id)}\n{self.log}") from None


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


@pytest.mark.extended
@stand_in_and_training(tasks=1)
def test_a_fresh_clone_trains_to_the_end_and_has_a_log(submit, tasks):
    job = submit(tasks=tasks, steps=3)
    assert job.wait_until_it_ends() == "COMPLETED", job.log
    assert job.restarts == 0
    assert sorted(job.losses) == [1, 2, 3]
    assert "loss" in job.log
    assert not list(job.root.glob(f"slurm-{job.id}.[cf]*"))


@pytest.mark.extended
@pytest.mark.slow(unless=["2-stand_in"])
@stand_in_and_training(tasks=2)
def test_a_signal_requeues_the_job_which_goes_on(submit, tasks):
    job = submit(tasks=tasks)
    job.wait_until_it_trains()
    job.cluster.command("scancel", "--signal=USR1", job.id)
    job.check_it_goes_on_after(job.wait_until_it_is_requeued())


@pytest.mark.extended
@pytest.mark.slow(only=["USR1-*"])
@only_stand_in
@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_signal_before_the_first_step_requeues_the_job(submit, name):
    """Nothing is saved yet: Python's default reaction to the signal ends it."""
    job = submit(tasks=2, settings=["seconds_to_start=3"])
    job.wait(lambda: len(job.tasks) == 4, "four tasks")
    job.cluster.command("scancel", f"--signal={name}", job.id)
    job.wait(lambda: job.restarts == 1, "it is requeued")
    job.wait_until_it_trains()


@pytest.mark.slow
@only_stand_in
@pytest.mark.parametrize("options", ["USR1@30", "B:USR1@30", "B:TERM@30"])
def test_the_time_limit_requeues_the_job(submit, options):
    """B: the signal goes to the batch shell alone. It may come up to a minute early."""
    job = submit("--time=60", f"--signal={options}", tasks=2)
    job.wait_until_it_trains()
    *_, minutes, _ = job.cluster.job(job.id)["RunTime"].split(":")
    job.cluster.command("scontrol", "update", f"JobId={job.id}", f"TimeLimit={int(minutes) + 1}")
    job.wait_until_it_is_requeued()


@pytest.mark.extended
@only_stand_in
def test_a_preempted_job_comes_back(submit):
    job = submit(tasks=2)
    job.wait_until_it_trains()
    words = ("--partition=high", "--nodes=2", f"--ntasks-per-node={CPUS_PER_NODE}", "--wrap=true")
    job.cluster.command("sbatch", "--output=/dev/null", *words)
    job.check_it_goes_on_after(job.wait_until_it_is_requeued())


@pytest.mark.extended
@only_stand_in
def test_a_job_that_is_requeued_by_hand_is_requeued_once(submit):
    job = submit(tasks=2)
    job.wait_until_it_trains()
    job.cluster.command("scontrol", "requeue", job.id)
    step = job.wait_until_it_is_requeued()
    job.check_it_goes_on_after(step)
    assert job.restarts == 1


@pytest.mark.extended
@only_stand_in
def test_a_cancelled_job_saves_and_stays_cancelled(submit):
    job = submit(tasks=2)
    job.wait_until_it_trains()
    job.cancel()
    assert job.saved
    assert job.restarts == 0


@pytest.mark.extended
def test_a_job_that_loses_a_task_is_requeued_so_many_times(submit):
    job = submit("--export=ALL,JAXPIPE_RESTARTS=1", tasks=2, settings=["checkpoint.every=5"])
    job.wait_until_it_trains(after=10)
    os.kill(job.tasks[-1], signal.SIGKILL)
    step, before = job.wait_until_it_is_requeued(), max(job.losses)
    job.wait_until_it_trains(after=before)
    assert f"resumed from step {step}" in job.log
    os.kill(job.tasks[-1], signal.SIGKILL)
    assert job.wait_until_it_ends() == "FAILED"
    assert job.restarts == 1
    wait_for(lambda: not job.tasks, 40, "the other tasks end")
    assert not list(job.root.glob(f"slurm-{job.id}.[cf]*"))


@pytest.mark.extended
@only_stand_in
def test_bad_input_ends_the_job(submit):
    job = submit(settings=["parallel.pp=9"])
    assert job.wait_until_it_ends() == "FAILED"
    assert job.cluster.job(job.id)["ExitCode"] == "2:0"
    assert job.restarts == 0
    assert "error: " in job.log


@only_stand_in
def test_a_clone_without_packages_is_told(submit, checkout):
    (checkout / ".venv" / "bin" / "python").unlink()
    job = submit()
    assert job.wait_until_it_ends() == "FAILED"
    assert job.cluster.job(job.id)["ExitCode"] == "2:0"
    assert "has no .venv/bin/python: call sbatch in the root of the repository" in job.log


@pytest.mark.slow
def test_after_a_node_failure_the_job_goes_on(submit):
    job = submit(tasks=2, settings=["checkpoint.every=20"])
    job.wait_until_it_trains(after=40)
    job.cluster.kill_node(NODES[1])
    job.wait(lambda: job.restarts >= 1, "it is requeued")
    saved, before = job.saved[-1], max(job.losses)
    job.cluster.start_nodes(NODES[1])
    job.wait_until_it_trains(after=before)
    assert saved <= before
    assert sorted(job.losses) == list(range(1, max(job.losses) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("checkout", ["training"], indirect=True)
def test_a_job_goes_on_without_a_node_that_stays_away(submit):
    job = submit("--nodes=1-2", tasks=2, settings=["checkpoint.every=20", "runtime.min_devices=2"])
    job.wait_until_it_trains(after=40)
    job.cluster.kill_node(NODES[1])
    try:
        job.wait(lambda: job.restarts >= 1 and job.state == "PENDING", "it is requeued")
        job.cluster.command("scontrol", "update", f"JobId={job.id}", "NumTasks=2")
        job.wait_until_it_trains(after=max(job.losses))
        assert "2 of 4 devices are left (runtime.min_devices=2): parallel.dp=1 instead" in job.log
        assert sorted(job.losses) == list(range(1, max(job.losses) + 1))
    finally:
        job.cancel()  # nodes are up when they are idle
        job.cluster.start_nodes(NODES[1])
