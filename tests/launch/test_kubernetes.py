"""launch/k8s_jobset.yaml: its failure rules fit the trainer's exit codes and one another."""

import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
JOBSET = yaml.safe_load((ROOT / "launch" / "k8s_jobset.yaml").read_text())["spec"]
JOB = JOBSET["replicatedJobs"][0]["template"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]


def action(exit_code=None, condition=None):
    """Return JobSet's action when a pod ends so, by its documentation and Kubernetes'."""
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(JOB["podFailurePolicy"]["rules"]):
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        if codes:
            assert (codes["containerName"], codes["operator"]) == (CONTAINER["name"], "In")
        if exit_code in (codes or {}).get("values", ()) or any(
            one == {"type": condition, "status": "True"} for one in conditions
        ):
            assert rule["action"] == "FailJob"
            reason, message = "PodFailurePolicy", f"... matching FailJob rule at index {index}"
            break
    for rule in JOBSET["failurePolicy"]["rules"]:
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"]
    return "RestartJobSet"


def test_exit_codes():
    assert action(exit_code=2) == action(exit_code=6) == "FailJobSet"
    assert action(exit_code=143) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action(exit_code=143, condition="DisruptionTarget") == action(exit_code=143)
    assert action(exit_code=137, condition="DisruptionTarget") == action(exit_code=143)
    for code in (1, 3, 4, 7, 134, 137, 139):
        assert action(exit_code=code) == "RestartJobSet"
    assert (JOB["backoffLimit"], POD["restartPolicy"]) == (0, "Never")


def test_processes_find_each_other():
    values = {one["name"]: one.get("value") for one in CONTAINER["env"]}
    assert int(values["JAX_NUM_PROCESSES"]) == JOB["completions"] == JOB["parallelism"]
    host, port = values["JAX_COORDINATOR_ADDRESS"].split(":")
    assert host == "jaxpipe-workers-0-0.jaxpipe"  # JOBSET-REPLICATEDJOB-JOB-POD.SERVICE
    assert CONTAINER["ports"] == [{"containerPort": int(port)}]


def test_devices_are_those_of_the_configuration():
    (name,) = [word for word in CONTAINER["command"] if word.endswith(".toml")]
    parallel = tomllib.loads((ROOT / name).read_text())["parallel"]
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"] * JOB["completions"]
    assert gpus % (parallel["pp"] * parallel["tp"]) == 0
    assert gpus == int(re.search(r"_(\d+)gpu", name)[1])


def test_volumes():
    mounts = {one["name"]: one["mountPath"] for one in CONTAINER["volumeMounts"]}
    volumes = {one["name"]: one for one in POD["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert any(word.startswith(f"run.dir={mounts['runs']}/") for word in CONTAINER["command"])
