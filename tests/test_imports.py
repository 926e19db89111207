"""A module imports only from packages in rows above its own, or from its own package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpipe

ROOT = Path(jaxpipe.__file__).parent
ROWS = [
    {"core"},
    {"schedules", "model"},
    {"config", "flax_models"},
    {"runtime"},
    {"optimizer", "tokenizer"},
    {"planning"},
    {"checkpoint", "data"},
    {"training"},
    {"inference"},
    {"run"},
    {"lab"},
    {"train", "plan", "profile", "score", "generate", "evaluate", "verify", "bench"},
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}


def modules():
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_parts(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxpipe"):
            names = (
                [node.module] if "." in node.module else [f"jaxpipe.{a.name}" for a in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("jaxpipe.")]
        else:
            continue
        yield from (name.split(".")[1] for name in names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_rows(path):
    own = part_of(path)
    assert own in ROW_OF, f"{own} stands in no row"
    for other in imported_parts(path):
        assert other == own or ROW_OF[other] < ROW_OF[own], f"{own} may not import {other}"


@pytest.mark.parametrize(
    "name",
    [
        "core.schedule",
        "core.contract",
        "schedules",
        "model",
        "config",
        "planning",
        "plan",
        "runtime.environment",
    ],
)
def test_row_zero_does_not_import_jax(name):
    code = f"import sys, jaxpipe.{name}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.extended
def test_a_trainer_needs_no_plots_and_no_event_files():
    code = (
        "import sys, jaxpipe.training.trainer, jaxpipe.run.loop;"
        "sys.exit(bool({'matplotlib', 'tensorboardX', 'chex'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_top_level_holds_only_what_it_should():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT.parent, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    fixed = {"pyproject.toml", "jaxpipe", "configs", "launch", "tests", "README.md"}
    assert top == fixed | {".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md"}
