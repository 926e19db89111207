"""Eight virtual CPU devices, strict NumPy broadcasting, and markers that choose cases."""

import gc
import os
import signal
from fnmatch import fnmatchcase

import pytest

from jaxpipe.runtime.environment import use_cpu_devices

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    # Tiny programs are compiled and run once: unoptimized machine code of the same HLO takes 40 %
    # less CPU time to compile.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    # Threads for 8 collectives at once on each device: a program that needs more is not stored.
    os.environ.setdefault("NPROC", "64")
    use_cpu_devices(8)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(50_000, 20, 100)  # tracing makes many objects, and few of them are garbage


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs():
    """Drop a file's compiled programs: thousands of them exhaust the memory maps of a process."""
    yield
    jax.clear_caches()


@pytest.fixture
def hangup_stops():
    """Restore what SIGHUP does by default, which `nohup` changes for this process and its own."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector):
    """Remove markers from cases that they do not select; fail where a pattern selects no case."""
    made = yield
    items = [item for item in made if isinstance(item, pytest.Function)] if made else []
    for name in ("slow", "extended"):
        marked = [(item, mark) for item in items for mark in item.own_markers]
        marked = [(item, mark) for item, mark in marked if mark.name == name]
        for mark in {id(mark): mark for _, mark in marked}.values():
            for pattern in (*mark.kwargs.get("only", ()), *mark.kwargs.get("unless", ())):
                if not any(_matches(item, pattern) for item, _ in marked):
                    test = items[0].originalname
                    raise collector.CollectError(f"{test}: {name}: {pattern!r} matches no case.")
        for item, mark in marked:
            if not _selects(mark, item):
                item.own_markers.remove(mark)
    return made


def _selects(mark, item):
    """Return whether `mark(only=[...])` or `mark(unless=[...])` selects a case, by its id."""
    if "only" in mark.kwargs:
        return any(_matches(item, pattern) for pattern in mark.kwargs["only"])
    return not any(_matches(item, pattern) for pattern in mark.kwargs.get("unless", ()))


def _matches(item, pattern):
    case = item.callspec.id if hasattr(item, "callspec") else ""
    return fnmatchcase(case, pattern.replace("[", "[[]"))
