"""What shows that a save or a restore moves, which Orbax does in threads of TensorStore."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

from jaxpipe.checkpoint.integrity import are_compared
from jaxpipe.checkpoint.listing import list_unfinished
from jaxpipe.config.paths import is_address
from jaxpipe.runtime.connections import bytes_to_stores
from jaxpipe.runtime.storage.files import AnyPath

_OF_PROCESS = "ocdbt.process_"  # begins the name of Orbax's folder of one process


def movement_of(directory: AnyPath, process: int) -> Callable[[], Any]:
    """A function whose result changes whenever a save or restore has moved bytes.

    It looks at TensorStore's counters, and at the sizes of the files that are being written below a
    directory of checkpoints, by this process or for all. For a store it looks at the bytes of
    TensorStore's connections, and at those of fsspec while it reads files back: otherwise these
    upload logs, also while nothing else moves.
    """

    def measure() -> Any:
        import tensorstore

        counters = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/")
        if is_address(directory):
            return str(counters), bytes_to_stores(python=are_compared())
        return str(counters), _sizes(directory, f"{_OF_PROCESS}{process}")

    return measure


def _sizes(directory: AnyPath, own: str) -> list[tuple[str, int]]:
    """The sizes of the files of unfinished saves, but for those of other processes."""
    sizes = []
    for unfinished in list_unfinished(directory):
        for folder, below, names in os.walk(unfinished):
            below[:] = [name for name in below if not name.startswith(_OF_PROCESS) or name == own]
            for name in names:
                with contextlib.suppress(OSError):  # it has just been renamed
                    path = os.path.join(folder, name)
                    sizes.append((path, os.stat(path).st_size))
    return sizes
