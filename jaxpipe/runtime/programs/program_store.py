"""Compiled programs in files, which the next start of a run, or another run, loads.

A file is a line of JSON and what jax writes of the program. jax unpickles that, so a file that
another user may have written is not read. Files are found in two ways:

- `load_program` has a trace of the program. It takes the file of a folder that names the same text,
  options and devices (`runtime.programs`), so never one of other settings or other source.
- `ProgramStore` has no trace: traces took up to a third of a second start. It finds a file of jax's
  compile cache by a digest of everything that the trace depends on; where that is not known, it
  stores nothing.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.tree_util import PyTreeDef

from jaxpipe.config import ConfigError, first_line
from jaxpipe.config.paths import is_address
from jaxpipe.runtime import processes
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.programs.collective_order import thread_count, why_not_loadable
from jaxpipe.runtime.programs.compile_cache import compile_timed, processor
from jaxpipe.runtime.storage.files import digest, write_whole
from jaxpipe.runtime.storage.own_files import why_not_own

_ENDING = ".program"
_SIZE = "the size of the program"  # in bytes


def _load(
    content: bytes, arguments: PyTreeDef, results: PyTreeDef, devices: Sequence[jax.Device]
) -> jax.stages.Compiled:
    """The program of a file; raises whatever jax raises for a damaged one."""
    return serialize_executable.deserialize_and_load(
        content, arguments, results, backend=devices[0].client, execution_devices=devices
    )


@dataclass(frozen=True)
class StoredProgram:
    """The file of a compiled program, which may not exist yet; its line has the tree of results.

    Attributes:
      path: of the file; None: the process has no directory for it.
      devices: of the program's mesh, in order.
      trees: of its arguments, and others of which its results may be made.
      count: number of its arguments.
    """

    path: Path | None
    devices: Sequence[jax.Device]
    trees: tuple[PyTreeDef, ...] = ()
    count: int = 0

    def load(self) -> jax.stages.Compiled | None:
        """The compiled program; None if a process of the run cannot load it. All call it."""
        compiled = self._read()
        return None if processes.group().any("loading of a program", compiled is None) else compiled

    def _read(self) -> jax.stages.Compiled | None:
        if self.path is None:
            return None
        with suppress(Exception):  # a damaged file may raise anything; the program is then compiled
            if why_not_own(self.path):
                return None
            head, _, content = self.path.read_bytes().partition(b"\n")
            arguments = tuple(jax.tree.unflatten(tree, [0] * tree.num_leaves)
                              for tree in self.trees[: self.count])  # fmt: skip
            inputs = jax.tree.structure((arguments, {}))
            return _load(content, inputs, self._decode(json.loads(head)), self.devices)
        return None

    def save(self, compiled: jax.stages.Compiled, from_cache: bool) -> None:
        """Write the program, in process 0, if it can be written and loaded again.

        Args:
          compiled: the program.
          from_cache: it is from jax's cache; XLA for CPUs cannot write a program it has loaded.
        """
        if self.path is None or not processes.first():
            return
        on_cpu = self.devices[0].platform == "cpu"
        if on_cpu and (from_cache or why_not_loadable(compiled.runtime_executable())):
            return
        # A program with callbacks, arrays as constants or a tree that JSON lacks is traced again by
        # the next start, as is one for which there is no room.
        with suppress(Exception):
            content, _, tree = serialize_executable.serialize(compiled)
            head = self._encode(jax.tree.unflatten(tree, [0] * tree.num_leaves))
            write_whole(self.path, f"{json.dumps(head)}\n".encode() + content)

    def _encode(self, node: Any) -> Any:
        """A tree of zeros as JSON: 0, or its kind, and its number in `trees` or its parts."""
        if type(node) is int or node is None:
            return node
        tree = jax.tree.structure(node)
        if tree in self.trees:
            return ["like", self.trees.index(tree)]
        if type(node) is dict and all(type(key) is str for key in node):
            return ["dict", {key: self._encode(part) for key, part in node.items()}]
        kinds: dict[type, str] = {list: "list", tuple: "tuple"}
        return [kinds[type(node)], [self._encode(part) for part in node]]

    def _decode(self, encoded: Any) -> PyTreeDef:
        def tree_of(encoded: Any) -> Any:
            if not isinstance(encoded, list):
                return encoded
            kind, parts = encoded
            if kind == "like":
                tree = self.trees[parts]
                return jax.tree.unflatten(tree, [0] * tree.num_leaves)
            if kind == "dict":
                return {key: tree_of(part) for key, part in parts.items()}
            return {"list": list, "tuple": tuple}[kind](map(tree_of, parts))

        return jax.tree.structure(tree_of(encoded))


@dataclass(frozen=True)
class ProgramStore:
    """The compiled programs of a run.

    Attributes:
      inputs: everything that the run's programs depend on, apart from devices, the arguments'
        shapes and settings of jax; "": unknown, and no program is stored.
      devices: of the mesh, in order.
    """

    inputs: str
    devices: Sequence[jax.Device]

    def find(self, name: str, *args: Any, results: Any = None) -> StoredProgram | None:
        """The program of this name for these arguments; None if no program is stored.

        `results` has the tree of its results, if that has other containers than those of JSON and
        of the arguments.
        """
        if not self.inputs:
            return None
        directory = jax.config.values["jax_compilation_cache_dir"]
        enabled = directory and jax.config.values["jax_enable_compilation_cache"]
        if not enabled or is_address(directory):
            return StoredProgram(None, self.devices)
        first, (leaves, tree) = self.devices[0], jax.tree.flatten(args)
        everything = (
            self.inputs,
            [(leaf.shape, str(leaf.dtype), str(getattr(leaf, "sharding", ""))) for leaf in leaves],
            str(tree),
            [(device.id, device.device_kind) for device in self.devices],
            (first.client.platform_version, processor(), thread_count()),
            sorted(jax.config.values.items()),
        )
        path = Path(directory) / f"{name}-{digest(repr(everything))}{_ENDING}"
        trees = tuple(map(jax.tree.structure, (*args, results)))
        return StoredProgram(path, self.devices, trees, len(args))

    def compiled(
        self, name: str, program: Any, *args: Any, results: Any = None
    ) -> jax.stages.Compiled:
        """The jitted function, loaded or compiled for these arguments."""
        return compile_timed(program, *args, stored=self.find(name, *args, results=results))[0]


def save_program(
    directory: Path,
    name: str,
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    devices: Sequence[jax.Device],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a compiled program, and return its file.

    Args:
      directory: of the file.
      name: of the program.
      lowered: the program that was compiled.
      compiled: it, compiled for the devices, which may be absent (`jax.experimental.topologies`).
        XLA for CPUs cannot write one that it has loaded, from the compile cache for example.
      devices: of its mesh, in order.
      options: the `compiler_options` that a run would compile it with.

    Raises:
      ConfigError: the directory cannot be written, or XLA for CPUs could wait for ever in the
        program once it is loaded (`collective_order.py`).
    """
    about = _describe(lowered, devices, options)
    if devices[0].platform == "cpu" and (reason := why_not_loadable(compiled.runtime_executable())):
        raise ConfigError(f"{name} cannot be saved: {reason}, or save it for GPUs.")
    content, _, _ = serialize_executable.serialize(compiled)
    header = json.dumps(about | {_SIZE: len(content)})
    path = directory / f"{name}-{digest(header)}{_ENDING}"
    try:
        write_whole(path, f"{header}\n".encode() + content)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written ({error.strerror}): choose another directory."
        ) from error
    return path


def load_program(
    group: Group,
    directory: Path,
    name: str,
    lowered: jax.stages.Lowered,
    devices: Sequence[jax.Device],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[jax.stages.Compiled | None, str]:
    """Load the file of a program in all processes of a group, or in none. All call it.

    Args:
      group: the processes of the run.
      directory: where `save_program` has written it.
      name: of the program.
      lowered: the program, as this run has traced it.
      devices: of its mesh, in order.
      options: the `compiler_options` of this run.

    Returns:
      The compiled program and "", or None and a sentence on why there is none, which is the same
      in all processes.
    """
    compiled, reason = _read_program(directory, name, lowered, devices, options)
    reason = next(filter(None, group.gather("saved program", reason)), "")
    return (None, reason) if reason else (compiled, "")


def _read_program(
    directory: Path,
    name: str,
    lowered: jax.stages.Lowered,
    devices: Sequence[jax.Device],
    options: Mapping[str, Any],
) -> tuple[jax.stages.Compiled | None, str]:
    """`load_program` in this process alone."""
    wanted, reason = _describe(lowered, devices, options), f"{directory} has no {name}"
    for path in sorted(directory.glob(f"{name}-*{_ENDING}")):
        try:
            if found := why_not_own(path):
                reason = f"{found}, and a program is code, so let only yourself write it"
                continue
            header, _, content = path.read_bytes().partition(b"\n")
        except OSError as error:
            reason = f"{path} cannot be read ({error.strerror})"
            continue
        try:
            about = json.loads(header)
        except ValueError:
            about = {}
        differences = [
            f"{what} is {value}, and in {path} {about.get(what)}"
            for what, value in (wanted | {_SIZE: len(content)}).items()
            if about.get(what) != value
        ]
        if differences:
            reason = differences[0]
            continue
        try:
            return _load(content, lowered.in_tree, lowered.out_tree, devices), ""
        except Exception as error:  # whatever a damaged file raises
            reason = f"{path} cannot be loaded ({first_line(error)})"
    return None, reason


def _describe(
    lowered: jax.stages.Lowered, devices: Sequence[jax.Device], options: Mapping[str, Any]
) -> dict[str, Any]:
    """What must be equal where a program is compiled and where it is loaded."""
    threads = {"the number of threads": thread_count()} if devices[0].platform == "cpu" else {}
    return threads | {
        "the version of jax": jax.__version__,
        "the version of jaxlib": jaxlib.__version__,
        "the kind of device": devices[0].device_kind,
        "the number of devices": len(devices),
        "the list of device ids": [device.id for device in devices],
        "the set of XLA's options": dict(options),
        "the program": digest(lowered.as_text()),
    }
