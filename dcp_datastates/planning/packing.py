"""The encoding of the messages of planning: sections of bytes, and columns of integers.

A column is short if its values are small, or an arithmetic progression.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from dcp_datastates.format.chunk_table import STORED, Ints, narrowed

__all__ = ["pack", "pack_ints", "unpack", "unpack_ints"]

_LENGTH = struct.Struct("<Q")
_COLUMN = struct.Struct("<cQ")
_STEPS = struct.Struct("<qq")
# the key is the number of bytes of a value
_WIDTHS = {b"%d" % width: dtype for width, dtype in STORED.items()}
# greatest count of values: more means damaged bytes, which must not cause an allocation
_MOST = 1 << 34


def pack(magic: bytes, sections: Sequence[bytes]) -> bytes:
    """Join the sections into bytes that :func:`unpack` splits again."""
    lengths = [_LENGTH.pack(len(section)) for section in sections]
    return b"".join((magic, *lengths, *sections))


def unpack(magic: bytes, count: int, data: bytes | memoryview) -> list[memoryview]:
    """The ``count`` sections that :func:`pack` joined, not copied. ValueError: ``data`` is not from :func:`pack`."""
    view = memoryview(data)
    if view[: len(magic)] != magic:
        raise ValueError(f"these bytes do not begin with {magic!r}, but {bytes(view[:8])!r}")
    at = len(magic) + count * _LENGTH.size
    if len(view) < at:
        raise ValueError(f"{len(view)} bytes are too short for {count} sections")
    sections = []
    for (length,) in _LENGTH.iter_unpack(view[len(magic) : at]):
        sections.append(view[at : at + length])
        at += length
    if at != len(view):
        raise ValueError(f"the sections should end at byte {at}, but there are {len(view)}")
    return sections


def pack_ints(values: Ints) -> bytes:
    """Pack 64-bit integers; an arithmetic progression takes 25 bytes."""
    count = len(values)
    if count > 1:
        first, step = int(values[0]), int(values[1] - values[0])
        if values[-1] == first + step * (count - 1) and (np.diff(values) == step).all():
            return _COLUMN.pack(b"s", count) + _STEPS.pack(first, step)
    narrow = narrowed(values)
    return _COLUMN.pack(b"%d" % narrow.itemsize, count) + narrow.tobytes()


def unpack_ints(data: memoryview, count: int) -> Ints:
    """The values that :func:`pack_ints` packed. ValueError: they are not ``count`` values (-1: any number)."""
    if len(data) < _COLUMN.size:
        raise ValueError(f"{len(data)} bytes are too short for a column")
    code, found = _COLUMN.unpack_from(data)
    body = data[_COLUMN.size :]
    if (found != count and count >= 0) or found > _MOST:
        raise ValueError(f"a column has {found} values where {count} belong")
    if code == b"s":
        if len(body) != _STEPS.size:
            raise ValueError(f"a progression has {len(body)} bytes instead of {_STEPS.size}")
        first, step = _STEPS.unpack(body)
        steps: Ints = first + step * np.arange(found, dtype=np.int64)
        return steps
    if code not in _WIDTHS or len(body) != found * int(code):
        raise ValueError(f"{len(body)} bytes are not {found} values of a column of type {code!r}")
    return np.frombuffer(body, _WIDTHS[code]).astype(np.int64)
