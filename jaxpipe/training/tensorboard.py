"""The numbers of a run as event files, which TensorBoard shows."""

import os
import socket
import struct
import time
from pathlib import Path

import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import histogram, scalar

from jaxpipe.config import Config
from jaxpipe.runtime.directory import AppendedFile
from jaxpipe.training.boards import Shown

_BINS = 64  # of a histogram


class TensorBoard:
    """Event files in `<run.dir>/tensorboard`; those of steps after `last_step` count no more.

    Events are records of the TFRecord format. tensorboardX's own writer would hand them to a
    thread, and wait for ever for it once that has died of a full disk.
    """

    def __init__(self, config: Config, last_step: int):
        directory = Path(config.run.dir) / "tensorboard"
        self.name = str(directory)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(directory / name)
        self._before = [  # of the first step: what a reader of the file wants to know first
            Event(file_version="brain.Event:2"),
            Event(step=last_step + 1, session_log=SessionLog(status=SessionLog.START)),
        ]

    def show(self, step: int, values: Shown) -> None:
        """Write them as scalars and histograms."""
        events, self._before = self._before, []
        for name, value in values.items():
            events.append(Event(step=step, summary=_summary(name, value)))
        self._file.append(b"".join(map(_record, events)))

    def close(self) -> None:
        """Write what is still to be written."""
        self._file.close()


def _summary(name: str, value: np.ndarray | int | float) -> Summary:
    if isinstance(value, np.ndarray):
        return histogram(name, value, _BINS)
    return _counter(name, value) if isinstance(value, int) else scalar(name, value)


def _counter(name: str, value: int) -> Summary:
    """A count as a scalar in float64, exact up to 2^53; other scalars are float32."""
    plugin = SummaryMetadata.PluginData(plugin_name="scalars")
    number = TensorProto(dtype="DT_DOUBLE", double_val=[value])
    metadata = SummaryMetadata(plugin_data=plugin)
    return Summary(value=[Summary.Value(tag=name, tensor=number, metadata=metadata)])


def _record(event: Event) -> bytes:
    event.wall_time = time.time()
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, content))
    return length + next(checksums) + content + next(checksums)
