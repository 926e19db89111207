"""Plants every fault of `faults.toml` in a copy of the tree and says which of them the tests see.

    ./launch/test.sh --mutants          with the short selection
    ./launch/test.sh --mutants --all    with every test of the paths that a fault names
    ./launch/test.sh --mutants -k ring  only faults whose name has "ring" in it

The measure of the suite: it ends with 0 only if every fault was caught. Before any fault is planted
the tests must pass, else they would "catch" everything.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
CAUGHT, PASSED, NONE_SELECTED = 1, 0, 5  # exit codes of pytest
SECONDS = 900  # of the tests of one fault: a fault that hangs is caught


@dataclass(frozen=True)
class Fault:
    """`old` stands exactly once in `file`; with `new` in its place some of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    @property
    def room(self) -> str:
        """The room that it is planted in."""
        return Path(self.file).parent.name


def read(path: Path = FAULTS) -> list[Fault]:
    """The faults of the list."""
    return [Fault(**entry) for entry in tomllib.loads(path.read_text())["fault"]]


def outdated(fault: Fault, root: Path = ROOT) -> str:
    """Why a fault cannot be planted; empty if it can."""
    path = root / fault.file
    if not path.exists():
        return f"{fault.file} is no more"
    count = path.read_text().count(fault.old)
    if count != 1:
        return f"its old text stands {count} times in {fault.file}"
    gone = [test for test in fault.tests if not (root / test.split("::")[0]).exists()]
    return f"{gone[0]} is no more" if gone else ""


def copied(directory: str) -> Path:
    """A copy of what git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    tree = Path(directory)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def tested(tree: Path, tests: list[str], short: bool) -> tuple[int, str]:
    """The exit code of pytest in that tree, and its first failure or last line."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    command += [*tests, *(["--short"] if short else [])]
    # Bytecode is found by a file's time and size, which a fault need not change.
    quiet = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, timeout=SECONDS, env=quiet
        )
    except subprocess.TimeoutExpired:
        return CAUGHT, f"no end in {SECONDS} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.M)
    lines = (run.stdout + run.stderr).strip().splitlines() or [""]
    return run.returncode, failed[1] if failed else lines[-1]


def planted(tree: Path, fault: Fault, short: bool) -> tuple[str, str]:
    """`(verdict, by which test)` of one fault."""
    if why := outdated(fault, tree):
        return "outdated", why
    path = tree / fault.file
    clean = path.read_text()
    path.write_text(clean.replace(fault.old, fault.new))
    try:
        code, said = tested(tree, fault.tests, short)
    finally:
        path.write_text(clean)
    if code == CAUGHT:
        return "caught", said
    return ("NOT caught", said) if code in (PASSED, NONE_SELECTED) else ("broken", said)


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 if every fault was caught."""
    parser = argparse.ArgumentParser(prog="./launch/test.sh --mutants")
    parser.add_argument("--all", action="store_true", help="with every test, not the short ones")
    parser.add_argument("-k", default="", metavar="TEXT", help="faults with this in their name")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="so many at once")
    args = parser.parse_args(argv)
    faults = [fault for fault in read() if args.k in fault.name]
    tests = sorted({test for fault in faults for test in fault.tests})
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(args.j) as workers:
        trees: SimpleQueue[Path] = SimpleQueue()
        for index in range(args.j):
            trees.put(copied(f"{directory}/{index}"))

        def on_a_tree(do, *rest):
            tree = trees.get()
            try:
                return do(tree, *rest)
            finally:
                trees.put(tree)

        parts = [tests[index :: args.j] for index in range(args.j)]
        for code, said in workers.map(lambda part: on_a_tree(tested, part, not args.all), parts):
            if code != PASSED:
                print(f"without a fault the tests must pass: {said}")
                return 2
        verdicts = workers.map(lambda fault: on_a_tree(planted, fault, not args.all), faults)
        for fault, (verdict, said) in zip(faults, verdicts):
            counts[verdict] = counts.get(verdict, 0) + 1
            print(f"{verdict:10s}  {fault.room:10s}  {fault.name:50s}  {said}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 0 if set(counts) <= {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main())
