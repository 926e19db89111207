"""The imports of jaxpipe and its tests, and the test files that can reach a file by them.

`python tests/support/near.py FILE...` prints those test files, nearest first, by the number of
imports between. A command that a test starts is none of its imports.
"""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"jaxpipe": "jaxpipe.", "tests/support": "", "tests/oracles": "oracles."}


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module of jaxpipe and of what its tests import, by its name."""
    found = {}
    for folder, prefix in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[(prefix + ".".join(parts)).rstrip(".")] = path
    return found


def files_of_tests() -> list[Path]:
    """Return all files of tests."""
    return sorted((ROOT / "tests").rglob("test_*.py"))


@cache
def imported_names(path: Path) -> tuple[tuple[str, str], ...]:
    """Return `(module, name)` of all imports of a file, those inside of functions too.

    `import module` has the name "".
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return tuple(found)


def defining_file(module: str, name: str) -> Path | None:
    """Return the file that defines a name of a module, also where a package re-exports it.

    None is a module of another distribution.
    """
    if name and f"{module}.{name}" in modules():
        return modules()[f"{module}.{name}"]
    path = modules().get(module)
    if path and path.name == "__init__.py":
        for origin, exported in imported_names(path):
            if exported == name:
                return defining_file(origin, name) or path
    return path


@cache
def imported_files(path: Path) -> frozenset[Path]:
    """Return the files that a file imports names from."""
    return frozenset(filter(None, (defining_file(*names) for names in imported_names(path))))


def reached(paths: Iterable[Path]) -> dict[Path, int]:
    """Return all files that can reach one of `paths`, by the number of imports between.

    Only where a package's own file is one of `paths`, imports by way of the package count too.
    """
    importers: dict[Path, set[Path]] = {}
    for path in {*modules().values(), *files_of_tests()}:
        packages = {modules().get(module) for module, _ in imported_names(path)}
        for target in imported_files(path) | packages.intersection(paths):
            importers.setdefault(target, set()).add(path)
    found = dict.fromkeys(paths, 0)
    frontier, distance = [*found], 0
    while frontier:
        distance += 1
        frontier = sorted({p for f in frontier for p in importers.get(f, ())} - found.keys())
        found |= dict.fromkeys(frontier, distance)
    return found


def nearest_tests(paths: Iterable[Path]) -> list[Path]:
    """Return the test files that can reach one of `paths`, nearest first.

    Those in the folder that is named like the package of a path come before all others.
    """
    paths = [*paths]
    found = reached(paths)
    own = {ROOT / "tests" / path.relative_to(ROOT / "jaxpipe").parent
           for path in paths if ROOT / "jaxpipe" in path.parents}  # fmt: skip
    tests = [path for path in files_of_tests() if path in found]
    return sorted(tests, key=lambda path: (path.parent not in own, found[path]))


def main(arguments: list[str]) -> int:
    """Print the tests of the files, or one sentence where there are none; return the exit code."""
    paths = [Path(name).resolve() for name in arguments]
    unknown = {*paths} - {*modules().values(), *files_of_tests()}
    nearest = [] if unknown else nearest_tests(paths)
    if not nearest:
        what = ", ".join(sorted(map(str, unknown or paths))) or "no file"
        sys.stderr.write(f"error: {what}: no test reaches it by imports.\n")
        return 2
    sys.stdout.writelines(f"{path.relative_to(ROOT)}\n" for path in nearest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
