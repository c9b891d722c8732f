"""The encoding of the messages of planning: dataclasses, whose fields may be columns of integers.

A message is a pickle behind its CRC32C: like DCP, unpickle only what ranks of this job have sent. A column is short if
its values are small, or an arithmetic progression.
"""

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import Field
from hashlib import blake2b
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from dcp_datastates._native import crc32c
from dcp_datastates.format.chunk_table import STORED, narrowed

__all__ = ["Message", "digest_of", "pack", "unpack"]

_CHECKSUM: Final = struct.Struct("<I")


class Message:
    """A dataclass that travels between ranks."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def encode(self) -> bytes:
        """The bytes; equal for equal messages."""
        return pack(*(getattr(self, name) for name in self.__dataclass_fields__))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The message that :meth:`encode` encoded. ValueError: the bytes are damaged, or another message's."""
        return cls(*unpack(data, len(cls.__dataclass_fields__)))


def pack(*values: object) -> bytes:
    """Encode ``values``: equal values give equal bytes, whether or not they are the same objects."""
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=4)
    pickler.fast = True  # no memo
    pickler.dump(values)
    data = file.getvalue()
    return _CHECKSUM.pack(crc32c(data)) + data


def unpack(data: bytes, count: int) -> tuple[Any, ...]:
    """The ``count`` values that :func:`pack` encoded. ValueError: the bytes are damaged, or something else."""
    body = memoryview(data)[_CHECKSUM.size :]
    if len(data) < _CHECKSUM.size or _CHECKSUM.unpack_from(data) != (crc32c(body),):
        raise ValueError(f"{len(data)} bytes of a message between ranks are damaged")
    try:
        values = pickle.loads(body)
    except Exception as error:  # pickle may raise anything
        raise ValueError(f"a message between ranks cannot be unpickled: {error}") from error
    if type(values) is not tuple or len(values) != count:
        raise ValueError(f"a message between ranks does not have the {count} values of this one")
    return values


def digest_of(encoded: bytes) -> bytes:
    """A digest of encoded bytes, 16 bytes."""
    return blake2b(encoded, digest_size=16).digest()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not np.ndarray:
            return NotImplemented
        count = len(value)
        if count > 1:
            first, step = int(value[0]), int(value[1]) - int(value[0])
            if value[-1] == first + step * (count - 1) and (np.diff(value) == step).all():
                return _progression, (first, step, count, value.dtype.str)
        narrow = narrowed(value)
        return _column, (narrow.itemsize, narrow.tobytes(), value.dtype.str)


def _progression(first: int, step: int, count: int, dtype: str) -> npt.NDArray[Any]:
    return (first + step * np.arange(count, dtype=np.int64)).astype(dtype)


def _column(width: int, data: bytes, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(data, STORED[width]).astype(dtype)
