"""Reads the header of a safetensors file, without trusting it.

Loads do not need the header (the metadata have all places); tools do. The format is that of safetensors: a length
(u64), JSON of that length, data. The rules are those of safetensors' own reader, so it opens every header that passes
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dcp_datastates.errors import CheckpointCorruptError
from dcp_datastates.format import values
from dcp_datastates.format.layout import MAX_HEADER_BYTES, SAFETENSORS_NAME
from dcp_datastates.format.values import ValueRefused, described

_MAX_BYTES: Final = (1 << 63) - 1
_MAX_DIMENSIONS: Final = 64

_BITS: Final[Mapping[str, int]] = {
    **{name: 8 * dtype.itemsize for dtype, name in SAFETENSORS_NAME.items()},
    **dict.fromkeys(("F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of an element, by the dtype names of safetensors 0.8: those that this package writes, and all others."""


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    """The dtype's name in safetensors."""
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Begin and end in bytes, relative to the header's ``data_start``."""


@dataclass(frozen=True)
class Header:
    """A file's header. The entries are adjacent, in this order, and fill the file."""

    entries: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str]
    data_start: int


def read_header(data: bytes, file_size: int) -> Header:
    """The header of a file of ``file_size`` bytes, whose first bytes are ``data``.

    Memory is proportional to the header, which is at most 100 MB and lies within the file.

    Raises :class:`CheckpointCorruptError` with the reason.
    """
    try:
        length = _length(data[:8], file_size)
        return _parse(data[8 : 8 + length], length, file_size)
    except ValueRefused as error:
        raise CheckpointCorruptError(f"safetensors header: {error}") from None


def _length(first: bytes, file_size: int) -> int:
    if len(first) < 8:
        raise ValueRefused("too short for a safetensors file")
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        raise ValueRefused(
            f"its header is said to have {length} bytes; {MAX_HEADER_BYTES} are allowed"
        )
    if length > file_size - 8:
        raise ValueRefused(f"its header is said to have {length} bytes, the file has {file_size}")
    return length


def _parse(data: bytes, length: int, file_size: int) -> Header:
    if len(data) < length:
        raise ValueRefused(f"its header is cut short: {len(data)} of {length} bytes")
    if not data.startswith(b"{"):
        raise ValueRefused("its header does not begin with '{'")
    values.check_memory(length, data)
    content = values.load(
        data, object_pairs_hook=_object, parse_float=_no_number, parse_constant=_no_number
    )
    metadata = content.pop("__metadata__", {})
    if type(metadata) is not dict or not set(map(type, metadata.values())) <= {str}:
        raise ValueRefused("its __metadata__ do not map strings to strings")
    for key, value in metadata.items():
        _check_text(key)
        _check_text(value)
    entries = sorted(
        (_entry(name, found) for name, found in content.items()),
        key=lambda entry: entry.data_offsets,
    )
    end = 0
    for entry in entries:
        if entry.data_offsets[0] != end:
            raise ValueRefused(
                f"{described(entry.name)} begins at {entry.data_offsets[0]}, not at {end}"
            )
        end = entry.data_offsets[1]
    data_start = 8 + length
    if data_start + end != file_size:
        raise ValueRefused(
            f"its tensors end at byte {data_start + end}, and the file at {file_size}"
        )
    return Header(tuple(entries), metadata, data_start)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueRefused("its header has a key twice")
    return found


def _no_number(text: str) -> int:
    raise ValueRefused(f"its header has a number that is no integer: {text[:40]}")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueRefused("its header has text that is no Unicode") from None


def _entry(name: str, found: Any) -> HeaderEntry:
    _check_text(name)
    if type(found) is not dict or found.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueRefused(f"{described(name)} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
    if type(dtype) is not str or dtype not in _BITS:
        raise ValueRefused(f"{described(name)} has an unknown dtype")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueRefused(f"the shape of {described(name)} is malformed")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueRefused(f"the data_offsets of {described(name)} are malformed")
    begin, end = offsets
    bits = _BITS[dtype]
    for size in shape:
        bits *= size or 1  # check the other sizes even if one is 0
        if bits > 8 * _MAX_BYTES:
            raise ValueRefused(f"{described(name)} is larger than any file")
    if 0 in shape:
        bits = 0
    if begin > end or bits != 8 * (end - begin):
        raise ValueRefused(
            f"{described(name)} lies from {begin} to {end}, but {dtype} of shape {shape} has {bits} bits"
        )
    return HeaderEntry(name, dtype, tuple(shape), (begin, end))


def _are_sizes(value: object) -> bool:
    return type(value) is list and all(
        type(size) is int and 0 <= size <= _MAX_BYTES for size in value
    )
