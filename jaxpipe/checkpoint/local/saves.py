"""Saves on the hosts' own disks or in their memory, with a copy on another host each.

Every process writes the shards that it holds, and sends the same files to a process of the next
host. So a run that loses a host has all shards, and goes on from such a save if it is newer than
the newest checkpoint in run.dir. As everywhere, processes agree through the coordination service.
"""

import json
import math
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax.traverse_util import unflatten_dict

from jaxpipe.checkpoint.compatibility import Check, check_same_arrays, drop_absent_variables
from jaxpipe.checkpoint.exclusion import leaves_by_name
from jaxpipe.checkpoint.integrity import DamagedError, succeed_on_all_processes
from jaxpipe.checkpoint.keying import StateKeying
from jaxpipe.checkpoint.local.shard_files import (
    Piece,
    SavedShard,
    assemble,
    check_piece,
    copy_shards,
    write_piece,
)
from jaxpipe.config import first_line
from jaxpipe.runtime.file_server import FileServer, NotReachedError, fetch, host_for_others, send
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage import files as storage
from jaxpipe.runtime.storage.errors import remedy_of

Tree = Any
Meta = dict[str, Any]
Say = Callable[[str], None]


class Save(NamedTuple):
    """A save: its step, when the start of the run that made it began [ns], and its processes."""

    step: int
    start: int
    processes: int

    @property
    def name(self) -> str:
        """Its folder."""
        return "-".join(map(str, self))


class Host(NamedTuple):
    """Where a process runs, and at which address the others reach its files."""

    name: str
    address: str


class LocalSaves:
    """The local saves of one run. All processes call its methods in the same order.

    The newest save that all processes have finished stays, and the one after it. Failures are
    reported by `say`, and training goes on. A state is in keyed form (`StateKeying`).

    Args:
      directory: a folder on this host, or in its memory.
      run: a word for the run, by which another run's saves in the folder are told apart.
      group: the processes of the run.
    """

    def __init__(self, directory: Path, run: str, group: Group):
        self._root, self._group = directory.absolute() / run, group
        problem = ""
        try:
            storage.probe(self._root)
        except OSError as error:
            problem = (
                f"checkpoint.local_dir={directory} cannot be written ({error.strerror}): make it a "
                f"folder on each host's own disk or in its memory, or leave local_every out."
            )
        group.refuse("folder of local saves", problem)
        word = f"{time.time_ns()} {secrets.token_hex()}"
        start, self._word = group.from_first("word of the start", lambda: word).split()
        self._start = int(start)
        self._server = FileServer(self._root, self._word)
        own = Host(socket.gethostname(), f"{host_for_others()}:{self._server.port}")
        hosts = group.gather("hosts of local saves", json.dumps(own))
        self._hosts = [Host(*json.loads(one)) for one in hosts]
        self._index, self._count = group.index, group.count
        self._neighbour = neighbour_of(self._index, [host.name for host in self._hosts])
        self._folders = self._adopt()
        self._writer = ThreadPoolExecutor(1, "local save")
        self._pending: tuple[Save, Future] | None = None
        self._failed = False

    def save(self, step: int, keyed: Tree, meta: Meta, say: Say) -> None:
        """Save a step; returns once the state is copied from the devices."""
        self.wait(say)
        shards, values = copy_shards(keyed)
        save = Save(step, self._start, self._count)
        self._pending = save, self._writer.submit(self._write, save, shards, values, meta)

    def wait(self, say: Say) -> None:
        """Wait until all processes have finished the last save; then remove those before it."""
        if self._pending is None:
            return
        (save, written), self._pending = self._pending, None
        error = written.exception()
        failures = self._group.gather("local save", json.dumps(_failure(error)) if error else "")
        was_failed, self._failed = self._failed, any(failures)
        if self._failed:
            self._remove(save.__eq__)
        else:  # pieces of the next save of this start may arrive already
            self._remove(lambda other: other.start != self._start or other.step < save.step)
        if self._failed and not was_failed:
            reason, remedy = json.loads(next(filter(None, failures)))
            say(
                f"warning: the local save of step {save.step} failed ({reason}): training goes on, "
                f"and the one before it stays{remedy and '; '}{remedy}."
            )

    def clear(self, say: Say) -> None:
        """Remove all saves of the run."""
        self.wait(say)
        self._remove(lambda _: True)

    def close(self, say: Say) -> None:
        """Wait for the last save, and stop serving files."""
        self.wait(say)
        self._writer.shutdown()
        self._server.close()

    def restore(
        self, since: int, keying: StateKeying, like: Tree, say: Say, check: Check | None
    ) -> tuple[Tree, Meta] | None:
        """The newest save with all its pieces, of step `since` or later, as `(state, meta)`.

        None if there is none. Pieces that are not as they were written are removed, and saves other
        than that which is restored. For the other arguments, and what it raises, see
        `CheckpointStore.restore`.
        """
        while found := self._newest(since, say):
            save, copies = found
            if damaged := self._remove_damaged(save):
                say(f"local save of step {save.step}: {', '.join(damaged)} is not used")
                continue
            try:
                with succeed_on_all_processes(self._group, self._root):
                    state, meta = self._read(copies, keying, like, check)
            except DamagedError as error:
                say(f"local save of step {save.step}: {error}; it is not used")
                return None
            self._remove(save.__ne__)
            say(f"step {save.step} is restored from local saves")
            return state, meta
        return None

    def _write(self, save: Save, shards: list[SavedShard], values: list[Any], meta: Meta) -> None:
        path = self._root / str(self._index) / save.name / str(self._index)
        write_piece(path, shards, values, meta)
        values.clear()
        if self._neighbour is None:
            return
        for suffix in (".bin", ".json"):
            name = f"{self._neighbour}/{save.name}/{self._index}{suffix}"
            address = self._hosts[self._neighbour].address
            send(address, self._word, name, path.with_suffix(suffix))

    def _adopt(self) -> list[Path]:
        """The folders of this host that this process answers for: its own, and some of others.

        After a restart with fewer processes the others are those of processes that are gone.
        """
        name = self._hosts[self._index].name
        here = [index for index, host in enumerate(self._hosts) if host.name == name]
        mine = here.index(self._index)
        left = sorted(
            int(path.name) for path in self._root.iterdir()
            if path.name.isdecimal() and int(path.name) not in here
        )  # fmt: skip
        return [self._root / str(index) for index in (self._index, *left[mine :: len(here)])]

    def _saves(self) -> Iterator[tuple[Save, Path]]:
        """The saves in this process's folders, with their folders."""
        for path in (path for folder in self._folders for path in folder.glob("*-*")):
            yield Save(*map(int, path.name.split("-"))), path

    def _remove(self, is_old: Callable[[Save], bool]) -> None:
        for save, path in self._saves():
            if is_old(save):
                shutil.rmtree(path, ignore_errors=True)

    def _newest(self, since: int, say: Say) -> tuple[Save, "Copies"] | None:
        """The newest complete save of step `since` or later, and the copies of its pieces."""
        own = [
            (save, int(piece.stem), str(piece.relative_to(self._root).with_suffix("")))
            for save, path in self._saves() for piece in path.glob("*.json")
        ]  # fmt: skip
        found: dict[Save, Copies] = {}
        gathered = self._group.gather("pieces of local saves", json.dumps(own))
        for process, text in enumerate(gathered):
            for save, index, name in json.loads(text):
                if (save := Save(*save)).step >= since:
                    found.setdefault(save, {}).setdefault(index, []).append((process, name))
        complete = [save for save, copies in found.items() if len(copies) == save.processes]
        if complete:
            return max(complete), found[max(complete)]
        if found:
            newest = max(found)
            lost = sorted(set(range(newest.processes)) - found[newest].keys())
            say(
                f"the local save of step {newest.step} is not used: no host of this run has the "
                f"pieces of {', '.join(f'process {index}' for index in lost)}"
            )
        return None

    def _remove_damaged(self, save: Save) -> list[str]:
        """Remove this process's pieces of a save that are damaged; returns those of all."""
        damaged = []
        for piece in (one for other, path in self._saves() if other == save
                      for one in path.glob("*.json")):  # fmt: skip
            try:
                check_piece(piece)
            except (DamagedError, OSError) as error:
                damaged.append(f"{piece} ({first_line(error)})")
                piece.unlink(missing_ok=True)
        gathered = self._group.gather("damaged pieces", json.dumps(damaged))
        return [one for text in gathered for one in json.loads(text)]

    def _read(
        self, copies: "Copies", keying: StateKeying, like: Tree, check: Check | None
    ) -> tuple[Tree, Meta]:
        parts: dict[str, list[Any]] = {}
        for places in copies.values():
            read = partial(self._read_file, places)
            piece = Piece.parse(read(".json"))
            for shard in piece.shards:
                values = partial(read, ".bin", shard.offset, shard.bytes)
                parts.setdefault(shard.name, []).append((shard, values))
        for name, of in parts.items():
            if sum(math.prod(one.sizes) for one, _ in of) != math.prod(of[0][0].shape):
                raise DamagedError(f"{name} is not complete")
        sizes = check(self._root, piece.meta) if check else {}
        stored = unflatten_dict(
            {
                tuple(name.split("/")): jax.ShapeDtypeStruct(one.shape, one.dtype)
                for name, ((one, _), *_) in parts.items()
            }
        )
        like = drop_absent_variables(stored, like)
        shapes = keying.keyed_shapes(like)
        check_same_arrays(shapes, stored, self._root, sizes=sizes)
        targets, structure = jax.tree.flatten(keying.restore_args(like))
        names = leaves_by_name(shapes)
        keyed = [assemble(target, parts[name]) for name, target in zip(names, targets)]
        return keying.to_stage_stacked(jax.tree.unflatten(structure, keyed), like), piece.meta

    def _read_file(
        self, places: list[tuple[int, str]], suffix: str, offset: int = 0, size: int = -1
    ) -> bytes:
        """A part of a piece's file, from this host if a copy is here."""
        try:
            for _, name in places:
                if (path := self._root / f"{name}{suffix}").exists():
                    with path.open("rb") as file:
                        file.seek(offset)
                        return file.read(size)
            process, name = places[0]
            address = self._hosts[process].address
            return fetch(address, self._word, f"{name}{suffix}", offset, size)
        except OSError as error:
            raise DamagedError(f"{name}{suffix} cannot be read ({first_line(error)})") from error


def _failure(error: BaseException) -> tuple[str, str]:
    """The reason why a save failed, and what to do about it; "" where that is not known."""
    if isinstance(error, NotReachedError):
        return first_line(error), "let the hosts reach each other"
    return first_line(error), remedy_of(error, "checkpoint.local_dir")


Copies = dict[int, list[tuple[int, str]]]  # by piece: processes that have it, and its file there


def run_word(directory: storage.AnyPath, group: Group) -> str:
    """A word that the first start of the run in a directory has left there, equal on all processes.

    A run that begins anew in a new directory of the same name has another, and so has a copy of the
    directory, which would otherwise take over the saves of the run.
    """

    def word() -> str:
        path, place = directory / "local_saves", str(storage.absolute(directory))
        if path.exists():
            known, _, written_at = path.read_text().partition("\n")
            if written_at in ("", place):  # earlier versions wrote no place
                return known
        new = secrets.token_hex(8)
        storage.write_whole(path, f"{new}\n{place}".encode())
        return new

    return group.from_first("word of the run", word)


def neighbour_of(index: int, hosts: Sequence[str]) -> int | None:
    """The process of the next host that keeps a process's copies; None if there is one host.

    >>> [neighbour_of(i, ["a", "a", "b", "b", "c", "c"]) for i in range(6)]
    [2, 3, 4, 5, 0, 1]
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return None
    after = names[(names.index(hosts[index]) + 1) % len(names)]
    there = [i for i, host in enumerate(hosts) if host == after]
    return there[hosts[:index].count(hosts[index]) % len(there)]
