"""Events of TensorBoard as TFRecord records."""

import struct
import time

import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import histogram, scalar

_BINS = 64  # bins of a histogram


def version_record() -> bytes:
    """The record with which a file must start."""
    return _record(Event(file_version="brain.Event:2"))


def start_record(last_step: int) -> bytes:
    """A START event, which makes TensorBoard discard earlier events of steps after `last_step`."""
    return _record(Event(step=last_step + 1, session_log=SessionLog(status=SessionLog.START)))


def value_record(step: int, name: str, value: np.ndarray | int | float) -> bytes:
    """A value of a step: a histogram of an array, or a scalar."""
    return _record(Event(step=step, summary=_summary(name, value)))


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
