"""The layout: from a plan to files and offsets. Pure functions, which access no file.

A rank writes one file, or a few when its plan holds several chunks of one FQN (a safetensors file has
one entry per name). Each file is one sequential stream and a valid safetensors file::

    0            header: length, JSON, spaces up to a multiple of 4096
    data_start   tensors, larger element sizes first (so each is aligned to its element)
                 objects (BYTE_IO), whose lengths no plan knows: they come after all tensors,
                 so that no tensor's offset depends on them
                 0 to 3 bytes of padding
    table_offset checksums, U32: one CRC32C per MiB of all before, then one of these words
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_datastates._native import BLOCK_BYTES, crc32c
from dcp_datastates.process.garbage import collection_paused

ALIGNMENT: Final = 4096
"""Data begin at a multiple of this: the largest logical block size of common storage."""

MAX_HEADER_BYTES: Final = 100_000_000
"""safetensors refuses longer headers."""

_SUFFIX: Final = ".safetensors"

_RESERVED: Final = "__dcp_datastates__"
"""Prefix of the names of entries that the layout adds (padding, checksums)."""

_UNKNOWN_SIZE: Final = 10**15
"""Placeholder for an object's size while the header's capacity is computed: it has more digits than any real size."""

SAFETENSORS_NAME: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of safetensors 0.8. A dtype that is missing here is stored as U8, with its name in the header."""


def stored_form(
    dtype: torch.dtype, sizes: Sequence[int], offsets: Sequence[int]
) -> tuple[str, list[int], list[int]]:
    """The safetensors dtype name, shape and offsets (in elements of that dtype) of a chunk of ``dtype``.

    A dtype without a safetensors name becomes ``U8``, with the last dimension in bytes.
    """
    name = SAFETENSORS_NAME.get(dtype)
    if name is not None:
        return name, list(sizes), list(offsets)
    if not sizes:
        return "U8", [dtype.itemsize], [0]
    return (
        "U8",
        [*sizes[:-1], sizes[-1] * dtype.itemsize],
        [*offsets[:-1], offsets[-1] * dtype.itemsize],
    )


class LayoutItem(NamedTuple):
    """What the layout needs of a ``WriteItem``."""

    fqn: str
    dtype: torch.dtype | None
    """None for an object, of which no more is needed."""
    sizes: Sequence[int] = ()
    offsets: Sequence[int] = ()
    """Of the chunk in the global tensor, in elements."""

    @staticmethod
    def of(item: WriteItem) -> LayoutItem:
        """Raises ``ValueError`` for an item that has no tensor's data, but should have."""
        if item.type == WriteItemType.BYTE_IO:
            return LayoutItem(item.index.fqn, None)
        data = item.tensor_data
        if data is None:
            raise ValueError(
                f"write item {item.index.fqn!r} of type {item.type} has no tensor data"
            )
        return LayoutItem(
            item.index.fqn, data.properties.dtype, data.chunk.sizes, data.chunk.offsets
        )


class TensorEntry(NamedTuple):
    """One chunk of one tensor in a file. ``offset``: its offset in the file; ``nbytes``: its dense size."""

    item: int
    """Position in the plan's ``items``."""
    key: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    """The chunk's offsets in the global tensor, in elements."""
    offset: int
    nbytes: int


class ObjectEntry(NamedTuple):
    """One BYTE_IO object in a file; its size is known only after it has been serialized."""

    item: int
    key: str


@dataclass(frozen=True)
class SealedFile:
    """A file with all sizes known. ``header`` is its first ``len(header)`` bytes."""

    header: bytes
    object_offsets: tuple[int, ...]
    object_sizes: tuple[int, ...]
    table_offset: int

    @functools.cached_property
    def nbytes(self) -> int:
        """The size of the file in bytes, checksum table included."""
        return file_bytes(self.table_offset)


class _Texts(NamedTuple):
    """Members of the header's JSON, for the tensors. Offsets count from the start of the data, so the texts are known
    before the header's length.
    """

    entries: str
    saved_offsets: str
    torch_dtypes: Mapping[str, str]


@dataclass(frozen=True)
class FileLayout:
    """One file of a rank: its contents, and the places of its tensors."""

    name: str
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    data_start: int
    tensors_end: int
    texts: _Texts

    @collection_paused()
    def seal(self, object_sizes: Sequence[int]) -> SealedFile:
        """Complete the layout with the size in bytes of each object, in the order of ``objects``."""
        if len(object_sizes) != len(self.objects):
            raise ValueError(f"{len(object_sizes)} sizes for {len(self.objects)} objects")
        end = self.tensors_end
        object_offsets = []
        for size in object_sizes:
            object_offsets.append(end)
            end += size
        table_offset = end + -end % 4
        start = self.data_start
        text = _header(
            self.name,
            self.texts,
            self.objects,
            object_sizes,
            self.tensors_end - start,
            padding=table_offset - end,
            words=table_words(table_offset),
        )
        header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
        return SealedFile(header, tuple(object_offsets), tuple(object_sizes), table_offset)


def _header(
    name: str,
    texts: _Texts,
    objects: Sequence[ObjectEntry],
    object_sizes: Sequence[int],
    begin: int,
    padding: int,
    words: int,
) -> bytes:
    """The header's JSON.

    Args:
        begin: where the objects begin, from the start of the data.
        padding: bytes between objects and checksums.
        words: the checksums.
    """
    stem = name.removesuffix(_SUFFIX)
    entries: dict[str, Any] = {}

    def put(key: str, dtype: str, count: int, size: int) -> None:
        nonlocal begin
        entries[key] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, begin + size]}
        begin += size

    for element, size in zip(objects, object_sizes, strict=True):
        put(element.key, "U8", size, size)
    if padding:
        put(f"{_RESERVED}.pad.{stem}", "U8", padding, padding)
    put(f"{_RESERVED}.crc32c.{stem}", "U32", words, 4 * words)
    saved_offsets = {key: {"saved_offsets": [0]} for key in entries}
    notes = {
        "version": 1,
        "objects": [element.key for element in objects],
        "torch_dtypes": texts.torch_dtypes,
    }
    metadata = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": _object(texts.saved_offsets, _json(saved_offsets)[1:-1]),
        "dcp_datastates": _json(notes),
    }
    first = f'"__metadata__":{_json(metadata)}'
    return _object(first, texts.entries, _json(entries)[1:-1]).encode()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


_quoted: Final = json.JSONEncoder().encode
"""A string in JSON, faster than by ``json.dumps``."""


def _object(*members: str) -> str:
    return f"{{{','.join(filter(None, members))}}}"


@collection_paused()
def lay_out(items: Sequence[LayoutItem], rank: int) -> tuple[FileLayout, ...]:
    """Lay out the items of one rank's final plan. Without items there are no files.

    The same items give the same layout on any machine. The ``n``-th chunk of an FQN goes to the
    rank's file ``n``; objects go to file 0. Raises ``ValueError`` for a name that no safetensors
    file can hold, or for more names than one header can.
    """
    tensors: list[list[int]] = []
    objects: list[int] = []
    seen: dict[str, int] = {}
    for position, item in enumerate(items):
        if item.dtype is None:
            objects.append(position)
            continue
        file = seen.get(item.fqn, 0)
        seen[item.fqn] = file + 1
        if file == len(tensors):
            tensors.append([])
        tensors[file].append(position)
    if objects and not tensors:
        tensors.append([])
    return tuple(
        _lay_out_file(items, chunks, objects if number == 0 else [], f"r{rank:05d}-{number}")
        for number, chunks in enumerate(tensors)
    )


def _lay_out_file(
    items: Sequence[LayoutItem], tensors: Sequence[int], objects: Sequence[int], stem: str
) -> FileLayout:
    """The file of the ``items`` at these positions."""
    name = f"{stem}{_SUFFIX}"
    chunks = sorted(
        (_entry(at, items[at]) for at in tensors), key=lambda entry: -entry.dtype.itemsize
    )
    ends = list(itertools.accumulate((chunk.nbytes for chunk in chunks), initial=0))
    texts = _texts(chunks, ends)
    object_entries = tuple([ObjectEntry(at, entry_key(items[at].fqn)) for at in objects])
    # The number of digits of an offset, and so the start of the data, depends on the header's very length only through
    # the table's number of words; MAX_HEADER_BYTES bounds that.
    sizes = [_UNKNOWN_SIZE] * len(objects)
    end = ends[-1] + sum(sizes) + 3
    words = table_words(end + MAX_HEADER_BYTES)
    longest = 8 + len(_header(name, texts, object_entries, sizes, ends[-1], 3, words))
    if longest > MAX_HEADER_BYTES:
        raise ValueError(
            f"{len(tensors) + len(objects)} entries need a header of {longest} bytes; safetensors "
            f"allows {MAX_HEADER_BYTES}: save fewer tensors per rank"
        )
    start = longest + -longest % ALIGNMENT
    entries = [
        chunk._replace(offset=start + begin) for chunk, begin in zip(chunks, ends[:-1], strict=True)
    ]
    return FileLayout(name, tuple(entries), object_entries, start, start + ends[-1], texts)


def _entry(position: int, item: LayoutItem) -> TensorEntry:
    """The entry of a tensor whose place is not known yet."""
    assert item.dtype is not None, "an object"
    key, nbytes = entry_key(item.fqn), math.prod(item.sizes) * item.dtype.itemsize
    return TensorEntry(position, key, item.dtype, tuple(item.sizes), tuple(item.offsets), 0, nbytes)


def _texts(chunks: Sequence[TensorEntry], ends: Sequence[int]) -> _Texts:
    entries: list[str] = []
    saved_offsets: list[str] = []
    torch_dtypes: dict[str, str] = {}
    alike: dict[Any, tuple[str, str]] = {}  # most tensors have the form of another
    spans = itertools.pairwise(ends)
    for (_, key, dtype, sizes, offsets, *_), (begin, end) in zip(chunks, spans, strict=True):
        if dtype not in SAFETENSORS_NAME:
            torch_dtypes[key] = str(dtype)
        texts = alike.get((dtype, sizes, offsets))
        if texts is None:
            name, shape, begins = stored_form(dtype, sizes, offsets)
            texts = _json({"dtype": name, "shape": shape})[:-1], _json({"saved_offsets": begins})
            alike[dtype, sizes, offsets] = texts
        form, saved = texts
        quoted = _quoted(key)
        entries.append(f'{quoted}:{form},"data_offsets":[{begin},{end}]}}')
        saved_offsets.append(f"{quoted}:{saved}")
    return _Texts(",".join(entries), ",".join(saved_offsets), torch_dtypes)


def entry_key(fqn: str) -> str:
    """The entry's name in the file: the FQN, or another name if safetensors or the layout reserves the FQN."""
    if fqn == "__metadata__" or fqn.startswith(_RESERVED):
        return f"{_RESERVED}.fqn.{fqn}"
    try:
        fqn.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"FQN {fqn!r} is not valid Unicode text and cannot name a tensor"
        ) from error
    return fqn


# ---- the checksum table --------------------------------------------------------------------------


def table_words(table_offset: int) -> int:
    """The number of words in the table of a file whose checksums begin at ``table_offset``."""
    return -(-table_offset // BLOCK_BYTES) + 1


def file_bytes(table_offset: int) -> int:
    """The size of a data file whose checksums begin at ``table_offset``."""
    return table_offset + 4 * table_words(table_offset)


def blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The blocks of ``[begin, end)``; ``begin`` is the start of a block, and the last block may be short."""
    for start in range(begin, end, BLOCK_BYTES):
        yield start, min(start + BLOCK_BYTES, end)


class ChecksumTable:
    """A checksum table, as stored."""

    def __init__(self, words: bytes) -> None:
        """``words``: at least one word; the last is the checksum of the others."""
        self._words = words[:-4]
        self.is_sound = crc32c(self._words) == int.from_bytes(words[-4:], "little")
        """Whether the table matches its own checksum."""

    def matches(self, begin: int, data: memoryview) -> bool:
        """Whether the block ``data`` that begins at ``begin`` matches its checksum."""
        at = 4 * (begin // BLOCK_BYTES)
        return crc32c(data) == int.from_bytes(self._words[at : at + 4], "little")
