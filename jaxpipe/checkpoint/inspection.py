"""Tables that describe a checkpoint, and whether its files are undamaged."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.checkpoint.listing import find_newest, list_steps
from jaxpipe.config import mask_secrets
from jaxpipe.config.units import readable_bytes
from jaxpipe.runtime.storage.files import AnyPath


def describe_checkpoint(directory: AnyPath) -> RenderableType:
    """Describe a checkpoint: step, parameters grouped over layers, sizes and configuration.

    Reads every file of the state once to compare it with its checksum.

    Args:
      directory: the directory of a step, or a run's directory, whose newest step is described.

    Raises:
      ConfigError: there is no checkpoint, it is damaged, or its format is newer.
    """
    checkpoint = StoredCheckpoint(find_newest(directory, "DIR"))
    steps = list_steps(checkpoint.directory.parent)
    parts: list[RenderableType] = [_describe_facts(checkpoint, steps), Text()]
    parts += [_parameter_table(checkpoint)]
    if config := checkpoint.meta.get("config"):
        parts += [
            Text(),
            Text(f"# the configuration that it was saved with\n{mask_secrets(config)}".rstrip()),
        ]
    return Group(*parts)


def _describe_facts(checkpoint: StoredCheckpoint, steps: list[int]) -> Text:
    """One line for each fact, as text: a table would truncate long paths."""
    meta, leaves = checkpoint.meta, checkpoint.leaves
    params = [leaf for path, leaf in leaves.items() if path[0] == "params"]
    moments = [leaf for path, leaf in leaves.items() if path[0] not in ("params", "variables")]
    layers = {path[2] for path in leaves if path[:2] == ("params", "layers")}
    facts = {
        "checkpoint": checkpoint.directory,
        "steps": ", ".join(map(str, steps)),
        "step": meta["step"],
        "layers": len(layers),
        "parameters": f"{sum(map(_size, params)):,}, {readable_bytes(_bytes(params))}",
        "checksums": (
            f"all {checkpoint.checked_files} files are as they were saved"
            if checkpoint.checked_files
            else "none: nothing proves that the arrays are undamaged"
        ),
        "moments": readable_bytes(_bytes(moments)) if moments else "none: parameters only",
    }
    facts |= {
        name: meta[name]
        for name in ("position", "data", "layout", "source", "format")
        if name in meta
    }
    if not steps:
        del facts["steps"]
    return Text("\n".join(f"{name:12}{value}" for name, value in facts.items()))


def _parameter_table(checkpoint: StoredCheckpoint) -> Table:
    """One row for each (name, shape, dtype) of parameters, with `*` for the layer index."""
    groups: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
    for path, leaf in checkpoint.leaves.items():
        if path[0] == "params":
            name = ("layers", "*", *path[3:]) if path[1] == "layers" else path[1:]
            shape = " x ".join(map(str, leaf.shape))
            groups["/".join(name), shape, str(leaf.dtype)].append(leaf)
    table = Table("parameter", "shape", "dtype", box=None)
    for title in ("number", "size"):
        table.add_column(title, justify="right")
    for row, leaves in sorted(groups.items()):
        table.add_row(*row, str(len(leaves)), readable_bytes(_bytes(leaves)))
    return table


def _size(leaf: Any) -> int:
    return math.prod(leaf.shape)


def _bytes(leaves: Iterable[Any]) -> int:
    return sum(_size(leaf) * leaf.dtype.itemsize for leaf in leaves)
