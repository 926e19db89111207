"""What shows that a save or a restore moves, which Orbax does in threads of TensorStore."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

from jaxpipe.checkpoint.listing import list_unfinished
from jaxpipe.config.paths import is_address
from jaxpipe.runtime.storage import AnyPath

_OF_PROCESS = "ocdbt.process_"  # begins the name of Orbax's folder of one process


def movement_of(directory: AnyPath, process: int) -> Callable[[], Any]:
    """A function whose result changes whenever a save or restore has moved bytes.

    It looks at the sizes of the files that are being written below a directory of checkpoints, by
    this process or for all, and at TensorStore's counters of bytes, which for a store change when a
    file is finished.
    """

    def measure() -> Any:
        import tensorstore

        counters = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/")
        sizes = [] if is_address(directory) else _sizes(directory, f"{_OF_PROCESS}{process}")
        return str(counters), sizes

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
