"""Compiled programs in the compile cache, found by what they would be traced from.

jax finds a program in its cache by the text that it has traced, and traces took up to a third of a
second start. A `ProgramStore` finds a program without a trace, by a digest of everything that the
trace depends on; where that is not known, it stores nothing.
"""

import hashlib
import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxpipe.config.paths import is_address
from jaxpipe.runtime import processes
from jaxpipe.runtime.collective_order import thread_count, why_not_loadable
from jaxpipe.runtime.compile_cache import compile_timed, processor
from jaxpipe.runtime.storage import write_whole


@dataclass(frozen=True)
class StoredProgram:
    """The file of a compiled program, which may not exist yet.

    Attributes:
      path: of the file; None: the process has no directory for it.
      devices: of the program's mesh, in order.
    """

    path: Path | None
    devices: Sequence[jax.Device]

    def load(self) -> jax.stages.Compiled | None:
        """The compiled program; None if a process of the run cannot load it. All call it."""
        compiled = self._read()
        return None if processes.largest(int(compiled is None)) else compiled

    def _read(self) -> jax.stages.Compiled | None:
        if self.path is None:
            return None
        with suppress(Exception):  # a damaged file may raise anything; the program is then compiled
            content, in_tree, out_tree = pickle.loads(self.path.read_bytes())
            return serialize_executable.deserialize_and_load(
                content, in_tree, out_tree,
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
        # A program with callbacks, arrays as constants or a tree that cannot be pickled is traced
        # again by the next start, as is one for which there is no room.
        with suppress(Exception):
            write_whole(self.path, pickle.dumps(serialize_executable.serialize(compiled)))


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

    def find(self, name: str, *args: Any) -> StoredProgram | None:
        """The program of this name for these arguments; None if no program is stored."""
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
        return StoredProgram(Path(directory) / f"{name}-{digest}.program", self.devices)

    def compiled(self, name: str, program: Any, *args: Any) -> jax.stages.Compiled:
        """The jitted function, loaded or compiled for these arguments."""
        return compile_timed(program, *args, stored=self.find(name, *args))[0]
