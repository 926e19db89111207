"""Compiled programs are stored in a directory and loaded by the next process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxpipe.config import ConfigError
from jaxpipe.runtime.programs.compile_cache import use_compile_cache
from jaxpipe.runtime.storage.files import cache_folder

SCRIPT = """
import sys
import jax
from jaxpipe.runtime.programs import compile_cache
compile_cache._LEAST_SECONDS = 0.0
compile_cache.use_compile_cache(sys.argv[1])
program, took = compile_cache.compile_timed(jax.jit(lambda x: x @ x + 1), jax.numpy.ones((4, 4)))
print(took, program(jax.numpy.ones((4, 4)))[0, 0])
"""


def compiled_in(setting, home):
    """Return what a new process reports that compiles a program with this setting."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", SCRIPT, setting]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.extended
def test_the_second_process_loads_what_the_first_compiled(tmp_path):
    assert ", compiled in " in compiled_in("auto", tmp_path)
    found = compiled_in("auto", tmp_path)
    assert ", loaded from the compile cache in " in found
    assert found.endswith(" 5.0\n")


@pytest.mark.extended
def test_old_programs_are_removed_from_the_default_directory_only(tmp_path):
    own = tmp_path / "own"
    for setting in ("auto", str(own)):
        compiled_in(setting, tmp_path)
        month_ago = time.time() - 31 * 86400
        for path in tmp_path.rglob("*"):
            os.utime(path, (month_ago, month_ago))
    assert ", loaded from " in compiled_in(str(own), tmp_path)
    assert ", compiled in " in compiled_in("auto", tmp_path)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runtime\.compile_cache=.*file/folder"):
        use_compile_cache(str(tmp_path / "file" / "folder"))


def test_without_a_home_nothing_is_kept(monkeypatch):
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    before = jax.config.jax_compilation_cache_dir
    use_compile_cache("auto")
    assert jax.config.jax_compilation_cache_dir == before
    with pytest.raises(ConfigError, match="no home directory: set XDG_CACHE_HOME"):
        cache_folder("runs")
