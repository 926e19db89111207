"""A module imports only from packages in rows above its own, or from its own package."""

import subprocess
import sys
from pathlib import Path

import pytest
from near import files_of_tests, imported_files, imported_names

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
    {"__main__"},
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}


def part_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path):
    """Return the full names of what a file imports, of packages also the name that it takes."""
    return {f"{module}.{name}".strip(".") for module, name in imported_names(path)}


def test_a_module_imports_only_from_rows_above_its_own():
    wrong = []
    for path in sorted(set(ROOT.rglob("*.py")) - {ROOT / "__init__.py"}):
        own = part_of(path)
        assert own in ROW_OF, f"{own} stands in no row"
        for name in imported_modules(path):
            package, other = (*name.split("."), "")[:2]
            if package == ROOT.name and other not in ("", own) and ROW_OF[other] >= ROW_OF[own]:
                wrong.append(f"{path.relative_to(ROOT)} may not import {name}")
    assert not wrong


def test_the_core_imports_jax_numpy_and_itself_alone():
    allowed = {"jax", "jaxlib", "numpy", *sys.stdlib_module_names}
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "core").rglob("*.py"))
        for name in imported_modules(path)
        if name.split(".")[0] not in allowed and not name.startswith("jaxpipe.core")
    ]
    assert not wrong


def test_tests_of_the_core_need_nothing_else_of_jaxpipe():
    """Nor do the helpers that they import."""
    tests, wrong = ROOT.parent / "tests", []
    found = files = {*(tests / "core").rglob("test_*.py")}
    while found:
        found = {f for path in found for f in imported_files(path) if tests in f.parents} - files
        files = files | found
    for path in sorted(files):
        names = [name for name in imported_modules(path) if name.startswith("jaxpipe")]
        wrong += [f"{path.name}: {name}" for name in names if not name.startswith("jaxpipe.core")]
    assert len(files) > 30
    assert not wrong


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


def test_no_two_files_of_tests_share_a_name():
    """pytest imports them by their names alone."""
    names = [path.name for path in files_of_tests()]
    assert sorted(set(names)) == sorted(names)


def test_top_level_holds_only_what_it_should():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT.parent, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    fixed = {"pyproject.toml", "jaxpipe", "configs", "launch", "tests", "README.md"}
    assert top == fixed | {".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md"}
