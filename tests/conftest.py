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


@pytest.hookimpl(tryfirst=True)  # before pytest applies `-m "not slow"`
def pytest_collection_modifyitems(items):
    """Remove a marker from the cases of a parametrized test that it does not select."""
    for item in items:
        for name in ("slow", "extended"):
            if (marker := item.get_closest_marker(name)) and not _means(marker, item):
                item.own_markers = [mark for mark in item.own_markers if mark is not marker]


def _means(marker, item):
    """Return whether `marker(only=[...])` or `marker(unless=[...])`, case ids, selects a case."""
    case = item.callspec.id if hasattr(item, "callspec") else ""

    def matches(patterns):
        return any(fnmatchcase(case, pattern.replace("[", "[[]")) for pattern in patterns)

    if "only" in marker.kwargs:
        return matches(marker.kwargs["only"])
    return not matches(marker.kwargs.get("unless", ()))
