"""TensorBoard's files of events."""

import struct

from tensorboardX.proto.event_pb2 import Event


def crc32c(content):
    """Compute Castagnoli's checksum, bit by bit."""
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(content):
    value = crc32c(content)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(directory):
    """Return the events of the only file there, whose checksums are verified."""
    (path,) = directory.glob("events*")
    content, found = path.read_bytes(), []
    while content:
        length, check = struct.unpack("<QI", content[:12])
        assert check == masked(content[:8])
        data, (check,) = content[12 : 12 + length], struct.unpack("<I", content[12 + length :][:4])
        assert check == masked(data)
        found.append(Event.FromString(data))
        content = content[16 + length :]
    return found
