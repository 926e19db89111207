"""The wheel: it has the command `jaxpipe` and the examples, and trains without a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxpipe.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]
SMALL = ["train.steps=2", "train.eval_every=0", "checkpoint.every=0", "model.n_layers=2",
         "parallel.pp=2", "parallel.dp=1", "runtime.cpu_devices=2"]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder with the contents of a wheel that is built from the repository's files."""
    pytest.importorskip("setuptools", reason="builds without the network need setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT / "jaxpipe", folder / "source" / "jaxpipe", symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    shutil.copytree(ROOT / "configs", folder / "source" / "configs")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(folder)],
        cwd=folder / "source", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.mark.extended
def test_the_quickstart_runs_from_the_wheel_alone(site, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "jaxpipe", "train", "--example", "quickstart", *SMALL]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text().count('"loss"') == 2


@pytest.mark.extended
def test_the_wheel_has_every_file_that_is_read(site):
    shipped = {path.name for path in (site / "jaxpipe" / "examples").iterdir()}
    assert shipped == {path.name for path in (ROOT / "configs").glob("*.toml")}
    read = {".py", ".html", ".js", ".txtpb", ".typed"}
    for path in (ROOT / "jaxpipe").rglob("*"):
        if path.suffix in read or path.name == "py.typed":
            assert (site / path.relative_to(ROOT)).is_file(), path
    (entry,) = site.glob("jaxpipe-*.dist-info/entry_points.txt")
    assert "jaxpipe = jaxpipe.__main__:main" in entry.read_text()


# Other tests of this process have imported some of the modules.
@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_its_module(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxpipe", name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert capsys.readouterr().out.startswith(f"usage: python -m jaxpipe.{name} ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tran"], "error: no command 'tran'; there are train, plan"),
        (["train", "--example", "quick"], "error: no example 'quick'; there are bench_s, "),
        (["train", "--example"], "error: no example ''; there are bench_s, "),
    ],
    ids=str,
)
def test_what_is_unknown_is_refused_with_what_there_is(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxpipe", *arguments])
    assert main() == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_help_names_the_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxpipe"])
    assert main() == 0
    assert capsys.readouterr().out.endswith(f"Commands: {', '.join(COMMANDS)}.\n")
