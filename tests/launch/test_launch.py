"""The launch scripts with a fake Python that only prints its arguments."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from scripts import LAUNCH, PYTHON, run


@pytest.mark.parametrize("script", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_scripts_can_be_read(script):
    if script.suffix in (".sh", ".sbatch"):
        assert os.access(script, os.X_OK) or script.name in ("environment.sh", "slurm.sbatch")
        subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("name", ["train", "plan", "bench"])
def test_a_command_is_installed_once_and_given_its_arguments(tree, name):
    first = run(tree, f"{name}.sh", "a b.toml", "train.steps=2")
    assert first[0] == 0, first
    *_, dots, asked = first[1].splitlines()
    assert asked == f"{tree}:  -m jaxpipe.{name} a b.toml train.steps=2"
    assert dots == ".."
    assert "-m pip install" in first[2]
    again = run(tree, f"{name}.sh", "a b.toml", "train.steps=2")
    assert again == (0, asked + "\n", "")
    with (tree / "pyproject.toml").open("a") as file:
        file.write("changed")
    assert "pip install" in run(tree, f"{name}.sh", "a b.toml")[2]


# A child process without root's rights, with which it may write anywhere.
SOMEBODY_ELSE = {"user": 65534, "group": 65534, "extra_groups": []}


@pytest.fixture
def of_another_user(tree):
    """Make the checkout read-only for commands run as `SOMEBODY_ELSE`."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others
        Path(folder).chmod(0o755)
        if subprocess.run(["ls", folder], check=False, **SOMEBODY_ELSE).returncode:
            pytest.skip("needs a folder for temporary files that others can read")
        copy = Path(shutil.copytree(tree.parent, Path(folder) / "copy"))
        copy.chmod(0o755)
        yield copy / tree.name


def test_a_checkout_that_is_ready_is_not_written(of_another_user):
    tree = of_another_user
    code, _, errors = run(tree, "train.sh", "own.toml", user=SOMEBODY_ELSE)
    assert code == 1
    assert f"you cannot write in {tree}: let its owner run this command" in errors
    assert run(tree, "train.sh", "own.toml")[0] == 0
    asked = f"{tree}:  -m jaxpipe.train own.toml\n"
    assert run(tree, "train.sh", "own.toml", user=SOMEBODY_ELSE) == (0, asked, "")


def test_users_with_other_pythons_share_an_environment(tree):
    """It keeps its owner's Python, unless a user names another one."""
    assert "making .venv with Python 3.12.1" in run(tree, "train.sh", "own.toml")[1]
    (tree.parent / "python3.13").write_text(PYTHON.replace("$VERSION", "3.13.0"))
    (tree.parent / "python3.13").chmod(0o755)
    newer = {"PATH": f"{tree.parent}:/usr/bin:/bin"}
    assert "making" not in run(tree, "train.sh", "own.toml", JAXPIPE_PYTHON="", **newer)[1]
    named = {"JAXPIPE_PYTHON": str(tree.parent / "python3.13")}
    assert "making .venv with Python 3.13.0" in run(tree, "train.sh", "own.toml", **named)[1]


def test_an_environment_made_by_hand_is_kept(tree):
    """With a GPU's packages, which a node without one would not install again."""
    own = tree / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    shutil.copy(tree.parent / "python", own)
    (tree / ".venv" / "cuda").touch()
    code, said, errors = run(tree, "train.sh", "own.toml", JAXPIPE_PYTHON="")
    assert code == 0, errors
    assert "making .venv" not in said
    assert "-m pip install" in errors
    assert (tree / ".venv" / "cuda").exists()
    assert run(tree, "train.sh", "own.toml", JAXPIPE_PYTHON="")[2] == ""


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("-c*) echo 29500", "-c*) exit 1"),
        ('"$VERSION" ]', "'' ]"),
        ('echo "$VERSION"', "echo 3.13.0"),
    ],
    ids=["without pip", "too old", "another version"],
)
def test_an_environment_made_by_hand_is_not_deleted(tree, ours, theirs):
    own = tree / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text(PYTHON.replace(ours, theirs))
    own.chmod(0o755)
    code, _, errors = run(tree, "train.sh", "own.toml")
    assert (code, own.exists()) == (1, True)
    assert errors == (
        "error: .venv is not jaxpipe's, and lacks pip or Python 3.12.1: move it away.\n"
    )


def test_an_environment_half_made_is_made_anew(tree):
    python = tree.parent / "python"
    python.write_text(PYTHON.replace("mkdir -p", "exit 1; mkdir"))
    assert run(tree, "train.sh", "own.toml")[0] == 1
    assert (tree / ".venv").exists()
    python.write_text(PYTHON)
    assert run(tree, "train.sh", "own.toml")[0] == 0


def test_a_checkout_that_moved_is_made_anew(tree):
    run(tree, "train.sh", "own.toml")
    moved = tree.rename(tree.parent / "moved")
    assert "making .venv" in run(moved, "train.sh", "own.toml")[1]
    (tree.parent / "link").symlink_to(moved)
    assert "making .venv" not in run(tree.parent / "link", "train.sh", "own.toml")[1]


def test_without_a_network_the_remedy_is_told_and_the_next_try_installs(tree):
    code, said, errors = run(tree, "train.sh", "own.toml", NO_NETWORK="1")
    assert code == 1
    assert "set PIP_INDEX_URL to a mirror, or PIP_NO_INDEX=1 and PIP_FIND_LINKS" in errors
    assert "jaxpipe.train" not in said
    assert "-m pip install" in run(tree, "train.sh", "own.toml")[2]


@pytest.mark.parametrize("script", ["train.sh", "plan.sh", "bench.sh", "local_multiprocess.sh"])
def test_all_paths_are_meant_from_where_the_user_stands(tree, script):
    """CONFIG, run.dir and data.path alike: the command runs there, with unchanged arguments."""
    here = tree.parent / "elsewhere"
    here.mkdir()
    words = ["own.toml", "run.dir=runs/a", "data.path=tokens"]
    several = ["1"] if script == "local_multiprocess.sh" else []
    code, said, errors = run(tree, script, *several, *words, cwd=here, CODES="0")
    assert code == 0, errors
    name = "train" if several else script.removesuffix(".sh")
    process = "0" if several else ""
    assert said.splitlines()[-1] == f"{here}: {process} -m jaxpipe.{name} {' '.join(words)}"


def test_an_installation_that_fails_ends_the_command(tree):
    python = tree.parent / "python"
    python.write_text(PYTHON.replace('echo "$*" >&2 ;;', "exit 1 ;;"))
    assert run(tree, "train.sh", "own.toml")[0] == 1
    assert not (tree / ".venv" / "installed").exists()


def test_paths_of_data_are_meant_from_where_the_user_stands(tree):
    here = tree.parent / "elsewhere"
    (here / "prepare").mkdir(parents=True)  # a folder of this name is not a path argument
    words = ["prepare", "own text", "--tokenizer", "bytes", "--out", "tokens"]
    _, said, errors = run(tree, "data.sh", *words, cwd=here)
    *_, asked = said.splitlines()
    assert asked == f"{here}:  -m jaxpipe.data {' '.join(words)}"
    assert errors.endswith("--editable .[data]\n")


def test_an_old_python_is_refused(tree):
    code, _, said = run(tree, "train.sh", "own.toml", VERSION="")
    assert code == 1
    assert "jaxpipe needs Python 3.11, 3.12 or 3.13" in said
    assert not (tree / ".venv").exists()


@pytest.mark.parametrize("out", [["--out", "out.json"], []], ids=str)
def test_the_report_of_a_gpu_is_tried_without_one(tree, out):
    """Into no file of GPU figures: `report` refuses to go without --out."""
    code, said, _ = run(tree, "gpu_report.sh", "--cpu", *out)
    assert code == 0
    assert said.splitlines()[-1] == " ".join([f"{tree}:  -m jaxpipe.bench report --cpu", *out])


def test_the_report_of_a_gpu_needs_one(tree):
    code, _, said = run(tree, "gpu_report.sh")
    assert code == 1
    assert said == (
        "nvidia-smi finds no GPU here: run this on a machine with one, or try it with --cpu.\n"
    )


@pytest.mark.parametrize(("driver", "code"), [("580.65.06", 0), ("570.1", 1)])
def test_a_driver_must_be_new_enough_for_the_packages(tree, driver, code):
    card = tree.parent / "cards"
    card.mkdir()
    (card / "nvidia-smi").write_text(f"#!/bin/sh\necho {driver}\n")
    (card / "nvidia-smi").chmod(0o755)
    ended, said, errors = run(tree, "gpu_report.sh", "--items", "ops", PATH=f"{card}:/usr/bin:/bin")
    assert ended == code
    if code:
        assert errors == "the driver 570.1 is too old for CUDA 13: install 580 or later.\n"
        return
    measured = said.splitlines()[-1]
    assert measured.endswith(" --out jaxpipe/lab/bench/results/gpu.json --items ops")
    assert "pip install" in errors
    assert "cuda13" in errors


def test_the_oldest_packages_are_installed_once(tree):
    (tree / "tests" / "support").mkdir(parents=True)
    (tree / "tests" / "support" / "versions.py").touch()
    (tree.parent / "python3.11").symlink_to(tree.parent / "python")
    given = {"PATH": f"{tree.parent}:/usr/bin:/bin", "VERSION": "3.11.9",
             "XDG_CACHE_HOME": str(tree.parent / "kept")}  # fmt: skip
    code, said, errors = run(tree, "test.sh", "--oldest", **given)
    assert code == 0, errors
    assert "-m pip install" in errors
    assert said.splitlines()[-1].endswith(" -m pytest -p no:cacheprovider -m versions and not slow")
    assert "pip install" not in run(tree, "test.sh", "--oldest", **given)[2]
    other = given | {"VERSION": "3.12.1", "PYENV_ROOT": "/nowhere"}
    code, _, errors = run(tree, "test.sh", "--oldest", **other)
    assert code == 1
    assert "the oldest packages are tested with the oldest Python" in errors


def test_the_core_and_what_is_near_answer_without_the_gpu_compiler(tree):
    kept = {"XDG_CACHE_HOME": str(tree.parent / "kept")}
    code, said, errors = run(tree, "test.sh", "--core", "-x", **kept)
    assert code == 0, errors
    assert errors.endswith("--editable .[test]\n")
    assert said.splitlines()[-1].endswith(" -m not extended and not slow tests/core -x")
    code, said, errors = run(tree, "test.sh", "--near", "tick.py", **kept)
    assert code == 0, errors
    assert "--session-timeout 60" in said.splitlines()[-1]
    assert said.splitlines()[-1].endswith(" tests/support/near.py tick.py")


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler supports Linux only")
def test_extended_tests_install_the_gpu_compiler(tree):
    errors = run(tree, "test.sh", "--extended", XDG_CACHE_HOME=str(tree.parent / "kept"))[2]
    assert errors.splitlines()[0].endswith("--editable .[aot,test]")
