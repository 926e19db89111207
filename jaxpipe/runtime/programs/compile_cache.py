"""Compiled programs kept on disk, so that the next start of a run loads them."""

import contextlib
import hashlib
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxpipe.config import ConfigError
from jaxpipe.config.paths import is_address
from jaxpipe.runtime.storage.files import user_cache
from jaxpipe.runtime.storage.own_files import why_not_own

if TYPE_CHECKING:
    from jaxpipe.runtime.programs.program_store import StoredProgram

_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_DAYS = 30  # after which an entry of the default directory is removed
_LEAST_SECONDS = 0.1  # a program that compiles faster is not stored
_HIT = "/jax/compilation_cache/cache_hits"

_hits: Counter[int] = Counter()  # programs loaded from the cache, by thread


def use_compile_cache(setting: str, say: Callable[[str], None] = print) -> None:
    """Let jax store compiled programs, and load those that it has stored.

    JAX_COMPILATION_CACHE_DIR, if set, takes precedence. A directory that another user may write is
    not used, since what it holds is code (`storage/own_files.py`); `say` gets a sentence then.

    Args:
      setting: `runtime.compile_cache`.
      say: prints a sentence.

    Raises:
      ConfigError: the directory that the setting names cannot be written.
    """
    of_jax = jax.config.values["jax_compilation_cache_dir"]
    given = of_jax if _VARIABLE in os.environ else setting
    if not given:
        return
    if is_address(given):  # who may write there, only its store can say
        jax.config.update("jax_compilation_cache_dir", given)
        return
    is_own = given == "auto" and _VARIABLE not in os.environ
    try:
        directory = _default_directory() if is_own else Path(given)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_own:
            directory.chmod(0o700)
            _remove_old(directory)
        reason = why_not_own(directory)
    except ConfigError:
        return  # no home
    except OSError as error:
        if is_own or _VARIABLE in os.environ:
            return  # a home that cannot be written, as in some containers
        raise ConfigError(
            f"runtime.compile_cache={setting!r} cannot be written ({error.strerror}): choose "
            f"another directory, or '' for none."
        ) from error
    if reason:
        jax.config.update("jax_enable_compilation_cache", False)
        say(
            f"warning: compiled programs are neither loaded from {given} nor stored there, since "
            f"{reason} and a program is code: everything is compiled; let runtime.compile_cache "
            f"name a folder that only you can write (chmod go-w), with no files of others"
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(directory.resolve()))
    if _VARIABLE not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)


def compile_timed(
    program: Any,
    *args: Any,
    enter: Callable[[str], None] = lambda phase: None,
    saved: Callable[[jax.stages.Lowered], tuple[Any, str]] = lambda lowered: (None, ""),
    stored: "StoredProgram | None" = None,
) -> tuple[Any, str]:
    """Compile a jitted function for these arguments.

    Args:
      program: the jitted function.
      *args: its arguments, or their shapes.
      enter: is told the phases "trace" and "compile" (`position.enter`).
      saved: returns the compiled program of a file, or None and a reason that the log gives, if any
        (`program_store.load_program`).
      stored: where the program is kept, to be found without a trace (`ProgramStore.find`).

    Returns:
      the compiled program, and how long it took, for the log.
    """
    _count_hits()
    start, thread = time.perf_counter(), threading.get_ident()
    enter("compile")
    if stored and (compiled := stored.load()):
        return compiled, f"loaded in {time.perf_counter() - start:.1f} s, without a trace"
    enter("trace")
    lowered = program.lower(*args)
    traced, hits = time.perf_counter(), _hits[thread]
    enter("compile")
    found, reason = saved(lowered)
    compiled = found or lowered.compile()
    ended = time.perf_counter()
    from_cache = _hits[thread] > hits
    if stored and not found:
        stored.save(compiled, from_cache)
    how = "loaded from the compile cache" if from_cache else "compiled"
    if found:
        how = "loaded from runtime.programs"
    words = f"traced in {traced - start:.1f} s, {how} in {ended - traced:.1f} s"
    return compiled, f"{words}, since {reason}" if reason else words


@cache
def _count_hits() -> None:
    """Count from now on; once in a process."""

    def count(event: str, **_: Any) -> None:
        if event == _HIT:
            _hits[threading.get_ident()] += 1

    jax.monitoring.register_event_listener(count)


def _default_directory() -> Path:
    """The user's cache directory; one for each kind of processor.

    Host code compiled for one processor may crash on another that shares the user's home.
    """
    return user_cache() / f"programs-{processor()}"


def processor() -> str:
    """A digest of the kind of this machine's processor."""
    text = platform.machine()
    path = Path("/proc/cpuinfo")
    if path.exists():
        wanted = ("model name", "flags", "Features")
        lines = path.read_text().split("\n\n")[0].splitlines()
        text += "".join(line for line in lines if line.startswith(wanted))
    # Not `storage.files.digest`, since the folders of earlier versions have this name.
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _remove_old(directory: Path) -> None:
    oldest = time.time() - _DAYS * 86400
    for path in directory.iterdir():
        with contextlib.suppress(OSError):  # another process removes it too
            if path.stat().st_mtime < oldest:
                path.unlink()
