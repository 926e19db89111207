"""Programs are loaded only from files that no other user can have written."""

import os
import stat

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.runtime.group import Group
from jaxpipe.runtime.programs.compile_cache import use_compile_cache
from jaxpipe.runtime.programs.program_store import StoredProgram, load_program, save_program
from jaxpipe.runtime.storage import own_files
from jaxpipe.runtime.storage.own_files import why_not_own


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "above" / "programs"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent, tmp_path):
        path.chmod(0o755)
    (folder / "a.program").write_text("")
    (folder / "a.program").chmod(0o644)
    return folder


def test_a_folder_of_ones_own_has_no_fault(folder):
    assert why_not_own(folder) == ""
    assert why_not_own(folder / "a.program") == ""
    folder.chmod(0o700)
    assert why_not_own(folder) == ""


@pytest.mark.parametrize("name", ["", "a.program", ".."])
@pytest.mark.parametrize(("mode", "who"), [(0o002, "every user"), (0o020, "its group")])
def test_what_others_can_write_is_not_ones_own(folder, monkeypatch, name, mode, who):
    monkeypatch.setattr(own_files, "_is_private", lambda about: False)
    path = folder / name
    path.chmod(stat.S_IMODE(path.stat().st_mode) | mode)
    for asked in (folder, folder / "a.program"):
        reason = why_not_own(asked)
        if asked in (folder, path) or name != "a.program":
            assert reason == f"{path.resolve()} can be written by {who}"


@pytest.mark.parametrize("name", ["", "a.program", ".."])
def test_what_belongs_to_others_is_not_ones_own(folder, monkeypatch, name):
    other = (folder / name).stat().st_ino
    lstat = os.lstat

    def with_owner(path):
        found = lstat(path)
        values = list(found)
        values[stat.ST_UID] = 12345 if found.st_ino == other else 0
        return os.stat_result(values)

    monkeypatch.setattr(own_files.os, "lstat", with_owner)
    assert why_not_own(folder) == f"{(folder / name).resolve()} belongs to another user"


def test_a_sticky_folder_above_protects_what_is_ones_own(folder):
    folder.parent.chmod(0o1777)
    assert why_not_own(folder) == ""
    folder.chmod(0o1777)
    assert "can be written by every user" in why_not_own(folder)


def test_a_link_in_a_folder_is_not_followed(folder):
    (folder / "b.program").symlink_to("/etc/hosts")
    assert why_not_own(folder).endswith("b.program is a link")


@pytest.fixture
def cache():
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("variable", [True, False])
def test_a_cache_that_others_can_write_is_not_used(folder, monkeypatch, cache, variable):
    said = []
    folder.chmod(0o777)
    if variable:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
        jax.config.update("jax_compilation_cache_dir", str(folder))
    else:
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    use_compile_cache("auto" if variable else str(folder), said.append)
    (sentence,) = said
    assert f"neither loaded from {folder} nor stored there, since {folder.resolve()}" in sentence
    assert not jax.config.jax_enable_compilation_cache


PLANTED = b"cos\nsystem\n(S'touch %s'\ntR."  # a pickle that runs a command


@pytest.mark.parametrize("mode", [0o644, 0o666])
def test_a_stored_program_is_no_pickle_and_of_nobody_else(folder, mode):
    path, mark = folder / "a.program", folder / "mark"
    device, x = jax.devices()[:1], jnp.float32(2.0)
    trees = (jax.tree.structure(x),)
    compiled = jax.jit(jnp.square).lower(x).compile()
    StoredProgram(path, device, trees, 1).save(compiled, from_cache=False)
    head = path.read_bytes().partition(b"\n")[0]
    assert head == b"0"  # its result is one array
    assert StoredProgram(path, device, trees, 1).load() is not None
    if mode == 0o644:  # one's own file may be damaged in any way
        path.write_bytes(PLANTED % bytes(mark))
    else:
        path.write_bytes(head + b"\n" + PLANTED % bytes(mark))
        path.chmod(mode)
    assert StoredProgram(path, device, trees, 1).load() is None
    assert not mark.exists()


def test_a_program_compiled_ahead_is_of_nobody_else(folder):
    x, device = jnp.float32(2.0), jax.devices()[:1]
    lowered = jax.jit(jnp.sin).lower(x)
    path = save_program(folder, "sin", lowered, lowered.compile(), device)
    assert load_program(Group(), folder, "sin", lowered, device)[0] is not None
    path.chmod(0o666)
    program, reason = load_program(Group(), folder, "sin", lowered, device)
    assert program is None
    assert reason == f"{path} can be written by every user, and a program is code, so let only "\
        "yourself write it"  # fmt: skip
