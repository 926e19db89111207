"""The short selection (`--short`): leaves out what `long.txt` names, and sees that enough is left.

A test is left to `--all` where others of the short selection run the same code with other numbers.
A line of `long.txt` is a pattern of test ids in which `*` stands for anything; the last line that
matches a test counts, and one that begins with `!` keeps it in.

The rest must run every function of jaxpipe (but those of `ELSEWHERE`), build every schedule, and
cut every axis of the mesh. That is watched from Python 3.12 on.
"""

import ast
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from jaxpipe.schedule import BUILDERS

LONG = Path(__file__).with_name("long.txt")
PACKAGE = Path(__file__).parents[1] / "jaxpipe"
ELSEWHERE = (  # functions that run before a session begins, in its children or in several processes
    "runtime.environment:use_cpu_devices",
    "checkpoint.__main__:_unraisable",
    "data.workers:_serve",
    "gpu.check:*",
    "gpu.report:*",
    "bench.pages:keep",
    "bench.processes:*",
    "bench.rounds:Rounds.kept",
    "bench.step:*",
    "bench.worker:*",
    "runtime.processes:_compiled_largest",
    "train:_leave_others",
)
WATCHED = {  # of these functions the arguments count
    "schedule.builders:build": lambda given: {f"the schedule {given['name'].lower()}"},
    "parallel.mesh:make_mesh": lambda given: {
        f"the mesh axis {axis}" for axis in ("pp", "dp", "tp") if given[axis] > 1
    },
}
WANTED = {f"the schedule {name}" for name in BUILDERS} | {
    f"the mesh axis {axis}" for axis in ("pp", "dp", "tp")
}


def pytest_addoption(parser):
    parser.addoption("--short", action="store_true", help="without the tests of tests/long.txt")


def pytest_configure(config):
    if config.getoption("short"):
        config.pluginmanager.register(_Short(config), "short")


class _Short:
    """What `--short` does to a session, and to each of its workers."""

    def __init__(self, config):
        self.whole = config.args == config.getini("testpaths") and not config.option.keyword
        self.recorder = _Recorder() if self.whole and sys.version_info >= (3, 12) else None
        self.seen = set()

    def pytest_collection_modifyitems(self, config, items):
        rules = _rules(LONG.read_text())
        names = [item.nodeid for item in items]
        stale = [rule.pattern for rule, _ in rules if not any(map(rule.fullmatch, names))]
        if self.whole and stale:
            raise pytest.UsageError(f"{LONG}: no test matches {', '.join(stale)}")
        long = {name for name in names if _is_long(name, rules)}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in long])
        items[:] = [item for item in items if item.nodeid not in long]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.seen |= set(getattr(node, "workeroutput", {}).get("touched", ()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self.recorder is None:
            return
        self.seen |= self.recorder.stop()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["touched"] = sorted(self.seen)
        elif not session.exitstatus and self.missing():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.recorder and (gap := self.missing()):
            terminalreporter.section("not touched by the short selection")
            terminalreporter.line("\n".join(gap))

    def missing(self):
        """What the session did not touch, in words."""
        return sorted(({*_functions()} | WANTED) - self.seen)


def _rules(text):
    """`(pattern, whether it keeps)` of each line."""
    lines = [line for line in map(str.strip, text.splitlines()) if line and line[0] != "#"]
    return [
        (re.compile(re.escape(line.removeprefix("!")).replace(r"\*", ".*")), line[0] == "!")
        for line in lines
    ]


def _is_long(name, rules):
    return [keeps for rule, keeps in rules if rule.fullmatch(name)][-1:] == [False]


def _functions():
    """Module and qualified name of every function that has a body and is not inside another."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = _module(path)
        if module.startswith("bench.peers"):
            continue
        todo = [("", ast.parse(path.read_text()))]
        while todo:
            prefix, node = todo.pop()
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef):
                    todo.append((f"{prefix}{child.name}.", child))
                elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    name = f"{module}:{prefix}{child.name}"
                    if not (_is_abstract(child) or any(fnmatch(name, way) for way in ELSEWHERE)):
                        yield name


def _is_abstract(function):
    """Whether it has nothing but a docstring, or says that others have it."""
    first, *rest = function.body
    doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    code = rest if doc else function.body
    return all("NotImplementedError" in ast.unparse(node) for node in code)


def _module(path):
    return ".".join(Path(path).relative_to(PACKAGE).with_suffix("").parts)


class _Recorder:
    """Notes each function of jaxpipe when it first begins; that costs nothing afterwards."""

    def __init__(self):
        self.seen = set()
        self._watch = sys.monitoring
        self._watch.use_tool_id(self._watch.PROFILER_ID, "jaxpipe")
        event = self._watch.events.PY_START
        self._watch.register_callback(self._watch.PROFILER_ID, event, self._begins)
        self._watch.set_events(self._watch.PROFILER_ID, event)

    def stop(self):
        self._watch.set_events(self._watch.PROFILER_ID, 0)
        self._watch.free_tool_id(self._watch.PROFILER_ID)
        return self.seen

    def _begins(self, code, _):
        if not code.co_filename.startswith(f"{PACKAGE}/"):
            return self._watch.DISABLE
        name = f"{_module(code.co_filename)}:{code.co_qualname}"
        self.seen.add(name)
        if name not in WATCHED:
            return self._watch.DISABLE
        self.seen |= WATCHED[name](sys._getframe(1).f_locals)
        return None
