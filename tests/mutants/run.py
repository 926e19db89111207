"""Plants every fault of `faults.toml` in a copy of the tree and says which of them the tests see.

    ./launch/test.sh --mutants          every fault
    ./launch/test.sh --mutants -k ring  only faults with "ring" in their room or name

The measure of the suite: it ends with 0 only if every fault was caught, and enough of them by the
short selection. Only the tests that a fault names are run: of these the short selection, then all.
Before any fault is planted they must pass, else they would "catch" everything.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
BY_SHORT, BY_ALL, MISSED = "short", "all only", "NOT CAUGHT"
SHORT_SHARE = 0.8  # of the faults, which the short selection must catch: 24 of 30
SECONDS = 400  # of the tests of a fault: one that hangs is caught
SECONDS_OF_ALL = 3600  # of all that faults name, without a fault


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
        return Path(self.file).parts[-2]


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


def first_failure(
    tree: Path, tests: list[str], *options: str, seconds: int = SECONDS
) -> str | None:
    """The first of these tests that fails in that tree, or how else they end; None: they pass.

    Raises `RuntimeError` where pytest cannot run them.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    # Bytecode is found by a file's time and size, which a fault need not change.
    quiet = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            [*command, *tests, *options],
            cwd=tree, capture_output=True, text=True, timeout=seconds, env=quiet,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end in {seconds} s"
    passed, failed, none_selected = 0, 1, 5
    if run.returncode in (passed, none_selected):
        return None
    said = (run.stdout + run.stderr).strip()
    test = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.M)
    if run.returncode == failed or test:
        return test[1] if test else said.splitlines()[-1]
    if run.returncode < 0:
        return f"pytest died of signal {-run.returncode}"
    raise RuntimeError(f"pytest cannot run {' '.join(tests)}: {said}")


def verdict(tree: Path, fault: Fault) -> tuple[str, str]:
    """Which selection catches a fault, and by which test."""
    path = tree / fault.file
    clean = path.read_text()
    path.write_text(clean.replace(fault.old, fault.new))
    try:
        if test := first_failure(tree, fault.tests, "--short"):
            return BY_SHORT, test
        if test := first_failure(tree, fault.tests):
            return BY_ALL, test
        return MISSED, ""
    finally:
        path.write_text(clean)


def check(faults: list[Fault], workers: int) -> Counter[str]:
    """Plant them all, print a line for each, and count the verdicts."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(workers) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for index in range(workers):
            trees.put(copied(f"{directory}/{index}"))

        def on_a_tree(do, *args, **options):
            tree = trees.get()
            try:
                return do(tree, *args, **options)
            finally:
                trees.put(tree)

        def unspoilt(tests):
            return on_a_tree(first_failure, tests, seconds=SECONDS_OF_ALL)

        tests = sorted({test for fault in faults for test in fault.tests})
        parts = [part for index in range(workers) if (part := tests[index::workers])]
        for failure in pool.map(unspoilt, parts):
            if failure:
                raise SystemExit(f"without a fault the tests must pass: {failure}")
        verdicts = pool.map(lambda fault: on_a_tree(verdict, fault), faults)
        for fault, (by, test) in zip(faults, verdicts):
            counts[by] += 1
            print(f"{by:10s}  {fault.room:10s}  {fault.name}  ({test})", flush=True)
    return counts


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 if every fault was caught, and enough by the short selection."""
    parser = argparse.ArgumentParser(prog="./launch/test.sh --mutants")
    parser.add_argument("-k", default="", metavar="TEXT", help="faults with this in room or name")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="so many at once")
    args = parser.parse_args(argv)
    faults = [fault for fault in read() if args.k in f"{fault.room} {fault.name}"]
    for fault in faults:
        if why := outdated(fault):
            raise SystemExit(f"{fault.name}: {why}; mend tests/mutants/faults.toml")
    counts = check(faults, args.j)
    print(f"{len(faults)} faults: caught by " + ", ".join(f"{by} {counts[by]}" for by in counts))
    enough = counts[BY_SHORT] >= SHORT_SHARE * len(faults)
    return 0 if enough and not counts[MISSED] else 1


if __name__ == "__main__":
    sys.exit(main())
