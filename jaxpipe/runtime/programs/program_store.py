"""Compiled programs in the compile cache, found by what they would be traced from.

jax finds a program in its cache by the text that it has traced, and traces took up to a third of a
second start. A `ProgramStore` finds a program without a trace, by a digest of everything that the
trace depends on; where that is not known, it stores nothing.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.tree_util import PyTreeDef

from jaxpipe.config.paths import is_address
from jaxpipe.runtime import processes
from jaxpipe.runtime.programs.collective_order import thread_count, why_not_loadable
from jaxpipe.runtime.programs.compile_cache import compile_timed, processor
from jaxpipe.runtime.storage.files import write_whole
from jaxpipe.runtime.storage.own_files import why_not_own


@dataclass(frozen=True)
class StoredProgram:
    """The file of a compiled program, which may not exist yet.

    A line of JSON with the tree of its results stands before what jax writes. jax unpickles that,
    so a file that another user may have written is not read.

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
            return serialize_executable.deserialize_and_load(
                content, jax.tree.structure((arguments, {})), self._decode(json.loads(head)),
                backend=self.devices[0].client, execution_devices=self.devices,
            )  # fmt: skip
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
        return [{list: "list", tuple: "tuple"}[type(node)], [self._encode(part) for part in node]]

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
        directory = jax.config.jax_compilation_cache_dir
        enabled = directory and jax.config.jax_enable_compilation_cache
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
        digest = hashlib.sha256(repr(everything).encode()).hexdigest()[:32]
        path = Path(directory) / f"{name}-{digest}.program"
        trees = tuple(map(jax.tree.structure, (*args, results)))
        return StoredProgram(path, self.devices, trees, len(args))

    def compiled(
        self, name: str, program: Any, *args: Any, results: Any = None
    ) -> jax.stages.Compiled:
        """The jitted function, loaded or compiled for these arguments."""
        return compile_timed(program, *args, stored=self.find(name, *args, results=results))[0]
