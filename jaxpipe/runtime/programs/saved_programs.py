"""Compiled programs in files, for a run on equal devices with equal versions to load.

A run traces its program before it looks for the file, and compares a digest of what it has traced
and XLA's options. So a file of other settings or other source is never taken.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from jaxpipe.config import ConfigError, first_line
from jaxpipe.runtime import processes
from jaxpipe.runtime.programs.collective_order import thread_count, why_not_loadable
from jaxpipe.runtime.storage.files import write_whole
from jaxpipe.runtime.storage.own_files import why_not_own

_ENDING = ".program"
_SIZE = "the size of the program"  # in bytes


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
    header = json.dumps(about | {_SIZE: len(content)}).encode()
    path = directory / f"{name}-{hashlib.sha256(header).hexdigest()[:16]}{_ENDING}"
    try:
        write_whole(path, header + b"\n" + content)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written ({error.strerror}): choose another directory."
        ) from error
    return path


def load_program(
    directory: Path,
    name: str,
    lowered: jax.stages.Lowered,
    devices: Sequence[jax.Device],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[jax.stages.Compiled | None, str]:
    """Load the file of a program in all processes of the run, or in none. All call it.

    Args:
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
    reason = next(filter(None, processes.group().gather("saved program", reason)), "")
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
            return serialize_executable.deserialize_and_load(
                content, lowered.in_tree, lowered.out_tree,
                backend=devices[0].client, execution_devices=devices,
            ), ""  # fmt: skip
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
        "the program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
    }
