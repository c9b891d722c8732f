"""What the messages of :mod:`ram_protocol` contain, as bytes."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable
from typing import Final

from typing_extensions import Buffer

from dcp_datastates.tiers.ram_files import Entry, Publish

__all__ = [
    "packed_entries",
    "packed_error",
    "packed_keys",
    "packed_number",
    "packed_publish",
    "packed_range",
    "unpacked_entries",
    "unpacked_error",
    "unpacked_keys",
    "unpacked_number",
    "unpacked_publish",
    "unpacked_range",
]

_RANGE: Final = struct.Struct("!QQ")
_ENTRY: Final = struct.Struct("!QQH")
_PUBLISH: Final = struct.Struct("!BQ")
_ERRNO: Final = struct.Struct("!I")


def packed_keys(keys: Iterable[str]) -> bytes:
    """What ``FIND``, ``LIST`` and ``PUT`` (one key) and ``DELETE`` contain."""
    return b"\0".join(os.fsencode(key) for key in keys)


def unpacked_keys(data: Buffer) -> list[str]:
    """The keys of :func:`packed_keys`."""
    return [os.fsdecode(key) for key in bytes(data).split(b"\0")]


def packed_number(number: int) -> bytes:
    """What the answer to ``LEFT`` contains."""
    return number.to_bytes(8, "big")


def unpacked_number(data: memoryview) -> int:
    """The number of :func:`packed_number`."""
    return int.from_bytes(data, "big")


def packed_range(key: str, begin: int, end: int) -> bytes:
    """What ``READ`` contains."""
    return _RANGE.pack(begin, end) + os.fsencode(key)


def unpacked_range(data: memoryview) -> tuple[str, int, int]:
    """Key, begin and end of :func:`packed_range`."""
    begin, end = _RANGE.unpack_from(data)
    return os.fsdecode(bytes(data[_RANGE.size :])), begin, end


def packed_entries(entries: Iterable[Entry]) -> bytes:
    """What the answers contain, before the bytes of an object."""
    parts = []
    for entry in entries:
        key = os.fsencode(entry.key)
        parts += [_ENTRY.pack(entry.nbytes, entry.modified_ns, len(key)), key]
    return b"".join(parts)


def unpacked_entries(data: memoryview, most: int = 1 << 62) -> tuple[list[Entry], memoryview]:
    """At most ``most`` entries, and what follows."""
    entries: list[Entry] = []
    while data.nbytes and len(entries) < most:
        nbytes, modified_ns, length = _ENTRY.unpack_from(data)
        data = data[_ENTRY.size :]
        entries.append(Entry(os.fsdecode(bytes(data[:length])), nbytes, modified_ns))
        data = data[length:]
    return entries, data


def packed_publish(how: Publish, modified_ns: int) -> bytes:
    """What ``PUBLISH`` contains."""
    return _PUBLISH.pack(how.value, modified_ns)


def unpacked_publish(data: memoryview) -> tuple[Publish, int]:
    """The arguments of :func:`packed_publish`."""
    how, modified_ns = _PUBLISH.unpack(data)
    return Publish(how), modified_ns


def packed_error(error: OSError) -> bytes:
    """What ``ERROR`` contains."""
    text = error.strerror or str(error) or type(error).__name__
    return _ERRNO.pack(error.errno or errno.EIO) + text.encode(errors="replace")


def unpacked_error(data: memoryview) -> OSError:
    """The error of :func:`packed_error`."""
    (number,) = _ERRNO.unpack_from(data)
    return OSError(number, bytes(data[_ERRNO.size :]).decode(errors="replace"))
