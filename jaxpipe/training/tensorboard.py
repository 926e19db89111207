"""TensorBoard event files of a run's metrics."""

import os
import socket
import struct
import time

import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import histogram, scalar

from jaxpipe.config import Config
from jaxpipe.runtime.directory import AppendedFile
from jaxpipe.runtime.spool import local_folder
from jaxpipe.training.loggers import Shown

_BINS = 64  # bins of a histogram


class TensorBoard:
    """A logger that writes event files to `<run.dir>/tensorboard`.

    Its START event makes TensorBoard discard earlier events of steps after `last_step`. Events are
    TFRecord records. tensorboardX's own writer is not used: it writes in a thread, and waits for it
    forever once the thread has died of a full disk.
    """

    def __init__(self, config: Config, last_step: int):
        directory = local_folder(config.run.dir) / "tensorboard"
        self.name = str(directory)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(directory / name)
        # Written with the first step, since a file must start with the version.
        self._before = [Event(file_version="brain.Event:2"), _start_after(last_step)]

    def show(self, step: int, values: Shown) -> None:
        """Write one step's values as scalars and histograms."""
        events, self._before = self._before, []
        for name, value in values.items():
            events.append(Event(step=step, summary=_summary(name, value)))
        self._file.append(b"".join(map(_record, events)))

    def rewind(self, last_step: int) -> None:
        """Make TensorBoard discard the events of steps after `last_step`."""
        self._before.append(_start_after(last_step))

    def close(self) -> None:
        """Write pending records and close the file."""
        self._file.close()


def _start_after(last_step: int) -> Event:
    return Event(step=last_step + 1, session_log=SessionLog(status=SessionLog.START))


def _summary(name: str, value: np.ndarray | int | float) -> Summary:
    if isinstance(value, np.ndarray):
        return histogram(name, value, _BINS)
    return _counter(name, value) if isinstance(value, int) else scalar(name, value)


def _counter(name: str, value: int) -> Summary:
    """An integer as a float64 scalar, exact up to 2^53; other scalars are float32."""
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
