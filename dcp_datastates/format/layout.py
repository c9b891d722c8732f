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

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_datastates.format.checksums import file_bytes, table_words
from dcp_datastates.process.garbage import collection_paused

__all__ = [
    "MAX_HEADER_BYTES",
    "SAFETENSORS_NAME",
    "FileLayout",
    "SealedFile",
    "TensorEntry",
    "entry_key",
    "is_bookkeeping",
    "is_linked",
    "is_table",
    "lay_out",
    "linked_name",
    "stored_form",
]

ALIGNMENT: Final = 4096
"""Data begin at a multiple of this: the largest logical block size of common storage."""

MAX_HEADER_BYTES: Final = 100_000_000
"""safetensors refuses longer headers."""

_SUFFIX: Final = ".safetensors"

_LINKED: Final = ".linked"
"""The suffix of a file of an earlier checkpoint. It may have former values of tensors, so it must not look like a
safetensors file of this checkpoint to a reader that lists the directory.
"""

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


@dataclass(frozen=True)
class TensorEntry:
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


@dataclass(frozen=True)
class ObjectEntry:
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

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes, checksum table included."""
        return file_bytes(self.table_offset)


@dataclass(frozen=True)
class FileLayout:
    """One file of a rank: its contents, and the places of its tensors."""

    name: str
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    data_start: int
    tensors_end: int

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
        header = self._header(object_sizes, table_offset).ljust(self.data_start)
        return SealedFile(header, tuple(object_offsets), tuple(object_sizes), table_offset)

    def _header(self, object_sizes: Sequence[int], table_offset: int | None) -> bytes:
        """The header's length and JSON, not padded. ``table_offset=None`` gives the longest header that the file
        may need.
        """
        stem = self.name.removesuffix(_SUFFIX)
        entries: dict[str, Any] = {}
        saved_offsets: dict[str, dict[str, list[int]]] = {}
        torch_dtypes: dict[str, str] = {}

        def put(
            key: str, name: str, shape: list[int], offsets: list[int], start: int, size: int
        ) -> None:
            begin = start - self.data_start
            entries[key] = {"dtype": name, "shape": shape, "data_offsets": [begin, begin + size]}
            saved_offsets[key] = {"saved_offsets": offsets}

        for entry in self.tensors:
            name, shape, offsets = stored_form(entry.dtype, entry.sizes, entry.offsets)
            if entry.dtype not in SAFETENSORS_NAME:
                torch_dtypes[entry.key] = str(entry.dtype)
            put(entry.key, name, shape, offsets, entry.offset, entry.nbytes)
        end = self.tensors_end
        for element, size in zip(self.objects, object_sizes, strict=True):
            put(element.key, "U8", [size], [0], end, size)
            end += size
        padding = 3 if table_offset is None else table_offset - end
        if padding:
            put(f"{_RESERVED}.pad.{stem}", "U8", [padding], [0], end, padding)
        words = table_words(end + padding + (MAX_HEADER_BYTES if table_offset is None else 0))
        put(f"{_RESERVED}.crc32c.{stem}", "U32", [words], [0], end + padding, 4 * words)

        notes = {
            "version": 1,
            "objects": [element.key for element in self.objects],
            "torch_dtypes": torch_dtypes,
        }
        metadata = {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(saved_offsets, separators=(",", ":")),
            "dcp_datastates": json.dumps(notes, separators=(",", ":")),
        }
        text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
        # The start of the data, and so the number of digits of an offset, depends on this very length only through the
        # table's number of words; MAX_HEADER_BYTES above bounds that.
        capacity = self.data_start - 8 if self.data_start else len(text)
        return capacity.to_bytes(8, "little") + text


@collection_paused()
def lay_out(
    items: Sequence[WriteItem], rank: int, left_out: Collection[int] = ()
) -> tuple[FileLayout, ...]:
    """Lay out the write items of one rank's final plan, but for those at the positions ``left_out``. Without items
    there are no files.

    The same items give the same layout on any machine. The ``n``-th chunk of an FQN goes to the
    rank's file ``n``; objects go to file 0. Raises ``ValueError`` for a name that no safetensors
    file can hold, or for more names than one header can.
    """
    tensors: list[list[tuple[int, WriteItem]]] = []
    objects: list[tuple[int, WriteItem]] = []
    seen: dict[str, int] = {}
    for position, item in enumerate(items):
        if position in left_out:
            continue
        if item.type == WriteItemType.BYTE_IO:
            objects.append((position, item))
            continue
        file = seen.get(item.index.fqn, 0)
        seen[item.index.fqn] = file + 1
        if file == len(tensors):
            tensors.append([])
        tensors[file].append((position, item))
    if objects and not tensors:
        tensors.append([])
    return tuple(
        _lay_out_file(chunks, objects if number == 0 else [], f"r{rank:05d}-{number}")
        for number, chunks in enumerate(tensors)
    )


def _lay_out_file(
    chunks: list[tuple[int, WriteItem]], objects: list[tuple[int, WriteItem]], stem: str
) -> FileLayout:
    ordered = sorted(chunks, key=lambda chunk: -_write_data(chunk[1]).properties.dtype.itemsize)
    relative: list[TensorEntry] = []
    end = 0
    for position, item in ordered:
        data = _write_data(item)
        nbytes = math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
        relative.append(
            TensorEntry(
                position,
                entry_key(item.index.fqn),
                data.properties.dtype,
                tuple(data.chunk.sizes),
                tuple(data.chunk.offsets),
                end,
                nbytes,
            )
        )
        end += nbytes
    object_entries = tuple(
        ObjectEntry(position, entry_key(item.index.fqn)) for position, item in objects
    )
    packed = FileLayout(f"{stem}{_SUFFIX}", tuple(relative), object_entries, 0, end)
    longest = packed._header([_UNKNOWN_SIZE] * len(objects), None)
    if len(longest) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{len(chunks) + len(objects)} entries need a header of {len(longest)} bytes; safetensors "
            f"allows {MAX_HEADER_BYTES}: save fewer tensors per rank"
        )
    data_start = len(longest) + -len(longest) % ALIGNMENT
    tensors = tuple(replace(entry, offset=data_start + entry.offset) for entry in relative)
    return replace(packed, tensors=tensors, data_start=data_start, tensors_end=data_start + end)


def _write_data(item: WriteItem) -> Any:
    if item.tensor_data is None:
        raise ValueError(f"write item {item.index.fqn!r} of type {item.type} has no tensor data")
    return item.tensor_data


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


def linked_name(rank: int, number: int, attempt: str) -> str:
    """The name of a linked file: file ``number`` of those that ``rank`` wrote in an earlier ``attempt``."""
    return f"r{rank:05d}-{number}.{attempt}{_LINKED}"


def is_linked(name: str) -> bool:
    """Whether a file of this name is one of an earlier checkpoint (``reuse="unchanged"``)."""
    return name.endswith(_LINKED)


def is_bookkeeping(key: str) -> bool:
    """Whether the layout added the entry of this name (padding, checksums): it is not a saved value."""
    return key.startswith(f"{_RESERVED}.pad.") or is_table(key)


def is_table(key: str) -> bool:
    """Whether an entry of this name is a file's checksum table."""
    return key.startswith(f"{_RESERVED}.crc32c.")
