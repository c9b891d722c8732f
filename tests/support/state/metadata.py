"""Metadata files made to order: whole as far as their checksums tell, and anything inside.

Written from the layout that the package documents (``dcp_datastates/format/metadata.py``), without its code.
"""

from __future__ import annotations

import copyreg
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from dcp_datastates._native import (
    crc32c,
)  # compared with support.state.files.crc32c in test_native_contract

COLUMNS = (
    *("properties", "ndims", "shapes", "counts", "offsets", "sizes"),
    *("files", "begins", "lengths"),
)
_CODES = {1: "B", 2: "H", 4: "I", 8: "q"}
_END_BYTES = 24


@dataclass
class Parts:
    """Metadata, taken apart. ``document`` may be JSON or bytes; columns are lists of integers."""

    pickled: bytes
    document: Any
    columns: dict[str, list[int]]
    entries: list[tuple[int, int]] = field(default_factory=list)
    """Of the directory; empty to have it made."""

    def place(self, name: str) -> int:
        """Where the place of the first chunk of ``name`` is in the columns of places."""
        number = self.document["names"].index(name)
        return sum(self.columns["counts"][:number])


def decision_of(path: Path) -> Path:
    """The file with the metadata of the checkpoint at ``path``: the decision about its newest attempt."""
    *_, newest = sorted(Path(path).glob("????????????????-????????*/decision"))
    return newest


def parts_of(path: Path) -> Parts:
    """The file of the checkpoint at ``path``, or the file itself."""
    path = Path(path)
    return _apart((decision_of(path) if path.is_dir() else path).read_bytes())


def _apart(data: bytes) -> Parts:
    magic, number, pickle_bytes, count, checksum = struct.unpack("<6s2sQII", data[-_END_BYTES:])
    assert (magic, number, count) == (b"DCPDST", b"\0\2", 1 + len(COLUMNS))
    assert crc32c(data[:-4]) == checksum
    directory = len(data) - _END_BYTES - 9 * count
    entries = list(struct.iter_unpack("<BQ", data[directory:-_END_BYTES]))
    at, values = pickle_bytes, []
    for width, length in entries:
        values.append(list(struct.unpack_from(f"<{length}{_CODES[width]}", data, at)))
        at += width * length
    assert at == directory
    document = json.loads(bytes(values[0]))
    return Parts(data[:pickle_bytes], document, dict(zip(COLUMNS, values[1:], strict=True)))


def file_of(parts: Parts) -> bytes:
    """The bytes of a file with these parts; each integer of a column that is too large wraps around."""
    document = parts.document
    if not isinstance(document, bytes):
        document = json.dumps(document).encode()
    bodies, entries = [document], [(1, len(document))]
    for name in COLUMNS:
        values = parts.columns[name]
        most = max(values, default=0) if min(values, default=0) >= 0 else 1 << 62
        width = 1 if most < 1 << 8 else 4 if most < 1 << 32 else 8
        wrapped = [(value + (1 << 63)) % (1 << 64) - (1 << 63) for value in values]
        bodies.append(struct.pack(f"<{len(values)}{_CODES[width]}", *wrapped))
        entries.append((width, len(values)))
    directory = b"".join(struct.pack("<BQ", *entry) for entry in parts.entries or entries)
    return ended(parts.pickled + b"".join(bodies) + directory, len(parts.pickled))


def ended(data: bytes, pickle_bytes: int, number: int = 2, count: int = 1 + len(COLUMNS)) -> bytes:
    """``data`` with an end behind it, whose checksum fits."""
    end = struct.pack("<6s2sQI", b"DCPDST", number.to_bytes(2, "big"), pickle_bytes, count)
    return data + end + struct.pack("<I", crc32c(data + end))


def with_format(data: bytes, number: int) -> bytes:
    """The file with another number of its format."""
    (pickle_bytes,) = struct.unpack_from("<Q", data, len(data) - 16)
    return ended(data[:-_END_BYTES], pickle_bytes, number)


def rewritten(path: Path, change: Callable[[Parts], None]) -> None:
    """Have ``change`` alter the parts of a checkpoint's metadata, and write the file again, checksum and all."""
    parts = parts_of(path)
    change(parts)
    decision_of(path).write_bytes(file_of(parts))


def process_wide() -> object:
    """All that the metadata's classes and shared objects look like: nothing in a file may change it."""
    kinds = [value for value in vars(dcp_metadata).values() if isinstance(value, type)]
    for kind in (*kinds, _StorageInfo):
        copyreg._slotnames(kind)  # a cache in the class: pickle fills it
    members = [member for kind in kinds if issubclass(kind, Enum) for member in kind]
    return [
        {name: id(value) for name, value in vars(thing).items() if name != "__abstractmethods__"}
        for thing in [*kinds, _StorageInfo, *members]
    ]
