"""The encoding of the messages of planning: frozen dataclasses, field by field.

How a field is encoded follows from its annotation:

- ``bytes`` as they are;
- ``Ints``: a column, which is short if its values are small, or an arithmetic progression;
- another message: its own encoding;
- any other type: plain values as JSON (:mod:`dcp_datastates.format.values`), compressed if long. Nothing is unpickled.
"""

from __future__ import annotations

import functools
import struct
import typing
import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final, TypeVar

import numpy as np
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates.format import values
from dcp_datastates.format.metadata_table import STORED, narrowed
from dcp_datastates.format.ragged import Ints
from dcp_datastates.format.values import properties_from_json, properties_to_json

_COLUMN = struct.Struct("<cQ")
_STEPS = struct.Struct("<qq")
# the key is the number of bytes of a value
_WIDTHS = {b"%d" % width: dtype for width, dtype in STORED.items()}
# greatest count of values, of one rank: more means damaged bytes, which must not cause an allocation
_MOST = 1 << 26

_DIGEST_BYTES: Final = 16
_MOST_TEXT_BYTES: Final = 1 << 30
"""Of the plain values in a message."""
_SHORT_TEXT_BYTES: Final = 512
"""Plain values up to this size are not compressed, which takes longer than all else."""

_Message = TypeVar("_Message", bound="Message")


class Message:
    """The base of a frozen dataclass that ranks send each other. Its ``__post_init__`` raises ValueError for fields
    that do not fit together.
    """

    def encode(self) -> bytes:
        """Equal messages give equal bytes."""
        magic, fields = _form_of(type(self))
        return pack(magic, [put(getattr(self, name)) for name, put, _ in fields])

    @classmethod
    def decode(
        cls: type[_Message], data: bytes | memoryview, known: dict[bytes, Any] | None = None
    ) -> _Message:
        """The message that :meth:`encode` encoded. ValueError: the bytes are damaged.

        ``known``: messages that are decoded with the same dict share equal messages within them.
        """
        magic, fields = _form_of(cls)
        sections = unpack(magic, len(fields), data)
        pairs = zip(sections, fields, strict=True)
        return cls(*[get(part, known) for part, (_, _, get) in pairs])


class Named(Message):
    """A message that ranks can name by its digest once the other side has it."""

    @classmethod
    def decode(
        cls: type[_Message], data: bytes | memoryview, known: dict[bytes, Any] | None = None
    ) -> _Message:
        found: _Message = super().decode(data, known)
        vars(found)["digest"] = _digest_of(data)
        return found

    @functools.cached_property
    def encoded(self) -> bytes:
        """The result of :meth:`encode`, which is kept."""
        return self.encode()

    @functools.cached_property
    def digest(self) -> bytes:
        """The digest of the encoding, 16 bytes."""
        return _digest_of(self.encoded)


def _digest_of(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


# --- fields -------------------------------------------------------------------------------------------

_Put = Callable[[Any], bytes]
_Get = Callable[[memoryview, dict[bytes, Any] | None], Any]


_forms: dict[type, tuple[bytes, list[tuple[str, _Put, _Get]]]] = {}


def _form_of(kind: type) -> tuple[bytes, list[tuple[str, _Put, _Get]]]:
    """How messages of this kind begin; and the fields, with what encodes and decodes each."""
    if kind not in _forms:
        fields = [(name, *_put_and_get(each)) for name, each in typing.get_type_hints(kind).items()]
        _forms[kind] = f"{kind.__name__}:".encode(), fields
    return _forms[kind]


def _put_and_get(hint: Any) -> tuple[_Put, _Get]:
    if hint is bytes:
        return bytes, lambda data, _: bytes(data)
    if hint == Ints:
        return pack_ints, lambda data, _: unpack_ints(data)
    if hint == tuple[TensorProperties, ...]:
        return (
            lambda table: _pack_json(list(map(properties_to_json, table))),
            lambda data, _: tuple(map(properties_from_json, _unpack_json(data))),
        )
    if isinstance(hint, type) and issubclass(hint, Message):
        return hint.encode, functools.partial(_decode_once, hint)
    return (
        lambda value: _pack_json(values.to_json(value)),
        lambda data, _: values.from_json(_unpack_json(data)),
    )


def _decode_once(kind: type[Message], data: memoryview, known: dict[bytes, Any] | None) -> Message:
    key = bytes(data)
    found = None if known is None else known.get(key)
    if found is None:
        found = kind.decode(data)
        if known is not None:
            known[key] = found
    return typing.cast(Message, found)


def _pack_json(content: Any) -> bytes:
    text = values.dump(content)
    return text if len(text) <= _SHORT_TEXT_BYTES else zlib.compress(text, 1)


def _unpack_json(data: memoryview) -> Any:
    if bytes(data[:1]) != b"x":  # with which compressed bytes begin, and no JSON
        return values.load(bytes(data))
    opened = zlib.decompressobj()
    try:
        text = opened.decompress(data, _MOST_TEXT_BYTES)
    except zlib.error as error:
        raise ValueError(f"compressed values are damaged: {error}") from error
    if not opened.eof:
        raise ValueError(f"compressed values are cut off, or longer than {_MOST_TEXT_BYTES} bytes")
    return values.load(text)


# --- sections and columns -----------------------------------------------------------------------------


def pack(magic: bytes, sections: Sequence[bytes]) -> bytes:
    """Join the sections into bytes that :func:`unpack` splits again."""
    lengths = struct.pack(f"<{len(sections)}Q", *map(len, sections))
    return b"".join((magic, lengths, *sections))


def unpack(magic: bytes, count: int, data: bytes | memoryview) -> list[memoryview]:
    """The ``count`` sections that :func:`pack` joined, not copied. ValueError: ``data`` is not from :func:`pack`."""
    view = memoryview(data)
    if view[: len(magic)] != magic:
        raise ValueError(f"these bytes do not begin with {magic!r}, but {bytes(view[:8])!r}")
    at = len(magic) + 8 * count
    if len(view) < at:
        raise ValueError(f"{len(view)} bytes are too short for {count} sections")
    sections = []
    for length in struct.unpack_from(f"<{count}Q", view, len(magic)):
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


def unpack_ints(data: memoryview) -> Ints:
    """The values that :func:`pack_ints` packed. ValueError: they are damaged."""
    if len(data) < _COLUMN.size:
        raise ValueError(f"{len(data)} bytes are too short for a column")
    code, count = _COLUMN.unpack_from(data)
    body = data[_COLUMN.size :]
    if count > _MOST:
        raise ValueError(f"a column has {count} values")
    if code == b"s":
        if len(body) != _STEPS.size:
            raise ValueError(f"a progression has {len(body)} bytes instead of {_STEPS.size}")
        first, step = _STEPS.unpack(body)
        steps: Ints = first + step * np.arange(count, dtype=np.int64)
        return steps
    if code not in _WIDTHS or len(body) != count * int(code):
        raise ValueError(f"{len(body)} bytes are not {count} values of a column of type {code!r}")
    return np.frombuffer(body, _WIDTHS[code]).astype(np.int64)
