"""The text of the standard library: written in full, split by file, checked for changes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxpipe.config import ConfigError
from jaxpipe.data.corpus import MANIFEST, PARTS, STDLIB, prepare_stdlib_corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Create forty modules of a hundred lines, all lines distinct."""
    root = tmp_path / "library"
    (root / "json" / "tests").mkdir(parents=True)
    (root / "site-packages").mkdir()
    names = sorted(sys.stdlib_module_names - {"encodings", "idlelib", "pydoc_data"})[:40]
    for name in names:
        (root / f"{name}.py").write_text("".join(f"{name}_{line} = {line}\n" for line in range(99)))
    (root / "json" / "__init__.py").write_text("kept = True\n")
    for skipped in ("json/tests/a.py", "site-packages/b.py", "encodings.py", "not_of_python.py"):
        (root / skipped).write_text("skipped = True\n")
    return root


def read(path: Path) -> bytes:
    return np.load(path).tobytes()


def test_parts_hold_every_source_once_and_share_no_line(library: Path, tmp_path: Path) -> None:
    train, heldout = map(read, prepare_stdlib_corpus(tmp_path / "data", 0.1, library))
    sources = b"".join(path.read_bytes() for path in library.glob("*.py"))
    kept = [line for line in sources.splitlines() if line != b"skipped = True"] + [b"kept = True"]
    assert sorted((train + heldout).splitlines()) == sorted(kept)
    assert not set(train.splitlines()) & set(heldout.splitlines())
    assert 0.1 <= len(heldout) / len(train + heldout) < 0.1 + 1 / 40


def test_same_sources_give_same_parts(library: Path, tmp_path: Path) -> None:
    first = prepare_stdlib_corpus(tmp_path / "a", 0.1, library)
    second = prepare_stdlib_corpus(tmp_path / "b", 0.1, library)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_parts_are_kept_when_the_library_changes(library: Path, tmp_path: Path) -> None:
    before = [path.read_bytes() for path in prepare_stdlib_corpus(tmp_path / "data", 0.1, library)]
    (library / "ast.py").write_text("changed = True\n")
    assert [
        path.read_bytes() for path in prepare_stdlib_corpus(tmp_path / "data", 0.1, library)
    ] == before


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed", "no manifest", "manifest"])
@pytest.mark.parametrize("part", PARTS)
def test_damaged_parts_are_written_anew(
    library: Path, tmp_path: Path, damage: str, part: str
) -> None:
    whole = [path.read_bytes() for path in prepare_stdlib_corpus(tmp_path / "data", 0.1, library)]
    path, manifest = tmp_path / "data" / part, tmp_path / "data" / MANIFEST
    content = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(content[:-1])
        case "changed":
            path.write_bytes(content[:-1] + b"?")
        case "no manifest":
            manifest.unlink()
        case "manifest":
            manifest.write_bytes(manifest.read_bytes()[:-9])
    assert [
        path.read_bytes() for path in prepare_stdlib_corpus(tmp_path / "data", 0.1, library)
    ] == whole


def test_another_fraction_cuts_anew(library: Path, tmp_path: Path) -> None:
    _, heldout = prepare_stdlib_corpus(tmp_path / "data", 0.1, library)
    few = len(read(heldout))
    _, heldout = prepare_stdlib_corpus(tmp_path / "data", 0.5, library)
    assert len(read(heldout)) > 4 * few


def test_killed_between_the_parts(library: Path, tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from jaxpipe.data import corpus

rename = Path.replace
def die_at_second(path, target):
    if target.name == {PARTS[1]!r}:
        os._exit(9)
    return rename(path, target)

Path.replace = die_at_second
corpus.prepare_stdlib_corpus(Path({str(tmp_path / "data")!r}), 0.1, Path({str(library)!r}))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert {path.suffix for path in (tmp_path / "data").iterdir()} == {".npy", ".tmp"}
    parts = prepare_stdlib_corpus(tmp_path / "data", 0.1, library)
    clean = prepare_stdlib_corpus(tmp_path / "clean", 0.1, library)
    assert [path.read_bytes() for path in parts] == [path.read_bytes() for path in clean]


def test_a_failed_write_leaves_nothing(library: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / PARTS[1]).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot be written to .*data: .*; choose a run\.dir"):
        prepare_stdlib_corpus(tmp_path / "data", 0.1, library)
    assert {path.name for path in (tmp_path / "data").iterdir()} == set(PARTS)


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none in .*: install them, or set data\.source"):
        prepare_stdlib_corpus(tmp_path / "data", 0.1, tmp_path)


def test_this_python_has_megabytes_of_sources(tmp_path: Path) -> None:
    train, heldout = map(read, prepare_stdlib_corpus(tmp_path, 0.05, STDLIB))
    assert 4e6 < len(train) + len(heldout) < 16e6
    assert len(heldout) / len(train + heldout) == pytest.approx(0.05, abs=0.02)
