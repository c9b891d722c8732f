"""The table that follows the pickle in a ``.metadata`` file, and the checksum of the whole file.

Format 2. Integers are little-endian, except for the number of the format:

1. The file consists of a pickle, the columns, the directory, and the end, without gaps.
2. The end is the last 24 bytes of the file:

   ====== ==== ==========================================================
   offset size
   ====== ==== ==========================================================
   0      6    ``DCPDST``
   6      2    the format, big-endian: 2
   8      8    length of the pickle; the columns begin there
   16     4    how many columns there are: 10
   20     4    CRC32C of all bytes of the file before these four
   ====== ==== ==========================================================

3. The directory has nine bytes for each column, in order: the bytes per value (1, 2, 4 or 8), and the number of values
   (8 bytes).
4. The columns follow one another without padding, in the order of the directory. Values of 1, 2 and 4 bytes are
   unsigned, those of 8 bytes are signed. A writer uses the smallest size that fits all values.
5. The first column, ``document``, has values of one byte: JSON in UTF-8 (:mod:`dcp_datastates.format.metadata`). The
   other columns are those of :data:`CATALOG` and :data:`PLACEMENT`, as documented in ``Catalog`` and ``Placement`` of
   :mod:`dcp_datastates.format.metadata_table`.

In every format from 2 on, the end is the last 24 bytes, with the same meaning of its first eight bytes, and with the
checksum in its last four. So a reader can distinguish a file of a later format from a damaged one.

Reading takes time and memory proportional to the file: a count in the file never causes an allocation before the reader
has checked that the counted bytes exist. (Columns are widened, and JSON becomes objects, within the limit of
``values.check_memory``.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp_datastates._native import crc32c
from dcp_datastates.errors import CheckpointCorruptError, UnreadableMetadataError
from dcp_datastates.format.metadata_table import STORED, Catalog, Ints, Placement, narrowed
from dcp_datastates.storage.object_path import Location

FORMAT: Final = 2

CATALOG: Final = ("properties", "ndims", "shapes", "counts", "offsets", "sizes")
PLACEMENT: Final = ("files", "begins", "lengths")
_COLUMNS: Final = CATALOG + PLACEMENT
"""The columns after the document, in order."""

_MAGIC: Final = b"DCPDST"
_END: Final = struct.Struct("<6s2sQII")
_CHECKSUM: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<BQ")


def columns_of(catalog: Catalog, placement: Placement) -> list[Ints]:
    """The columns after the document, in order."""
    columns = [getattr(catalog, name) for name in CATALOG]
    return columns + [getattr(placement, name) for name in PLACEMENT]


def append(pickled: bytes, document: bytes, columns: Iterable[Ints]) -> bytes:
    """The bytes of a whole file: ``pickled``, followed by the table with these :func:`columns_of`."""
    packed = [np.frombuffer(document, np.uint8), *map(narrowed, columns)]
    parts: list[bytes | memoryview] = [pickled, *(column.data for column in packed)]
    parts += [_ENTRY.pack(column.itemsize, len(column)) for column in packed]
    number = FORMAT.to_bytes(2, "big")
    parts.append(_END.pack(_MAGIC, number, len(pickled), len(packed), 0)[: -_CHECKSUM.size])
    checksum = 0
    for part in parts:
        checksum = crc32c(part, checksum)
    return b"".join((*parts, _CHECKSUM.pack(checksum)))


END_BYTES: Final = _END.size


def is_end(end: bytes) -> bool:
    """Whether a file that ends with these :data:`END_BYTES` bytes ends as those of this package do."""
    return len(end) == _END.size and end.startswith(_MAGIC)


def parse(data: bytes, path: Location) -> tuple[bytes, dict[str, npt.NDArray[Any]]]:
    """The document and the columns in ``data``, the bytes of the file at ``path``; the columns as they are stored.

    Does not check the columns' values. Raises :class:`CheckpointCorruptError` if the bytes are damaged, and
    :class:`UnreadableMetadataError` if they are intact but of another format.
    """
    pickle_bytes, count = _end(data, path)
    directory = len(data) - _END.size - count * _ENTRY.size
    if count != 1 + len(_COLUMNS) or directory < pickle_bytes:
        raise UnreadableMetadataError(f"{path}: not checkpoint metadata: it has {count} columns")
    entries = list(_ENTRY.iter_unpack(data[directory : len(data) - _END.size]))
    if {width for width, _ in entries} - STORED.keys() or entries[0][0] != 1:
        raise UnreadableMetadataError(f"{path}: not checkpoint metadata: a column has no type")
    if sum(width * length for width, length in entries) != directory - pickle_bytes:
        raise UnreadableMetadataError(
            f"{path}: not checkpoint metadata: its columns do not fill the table"
        )
    at = pickle_bytes
    found = []
    for width, length in entries:
        found.append(np.frombuffer(data, STORED[width], length, at))
        at += width * length
    return found[0].tobytes(), dict(zip(_COLUMNS, found[1:], strict=True))


def _end(data: bytes, path: Location) -> tuple[int, int]:
    """The length of the pickle and the number of columns, from the end of an intact file of this format."""
    end = data[-_END.size :]
    if len(end) < _END.size or not end.startswith(_MAGIC):
        raise CheckpointCorruptError(
            f"{path}: no checksums at its end; the file is cut short, damaged, or was not written by "
            f"dcp_datastates (torch.distributed.checkpoint.FileSystemReader loads stock checkpoints)"
        )
    _, number, pickle_bytes, count, checksum = _END.unpack(end)
    if crc32c(memoryview(data)[: -_CHECKSUM.size]) != checksum:
        raise CheckpointCorruptError(f"{path}: checksum mismatch; the metadata file is damaged")
    version = int.from_bytes(number, "big")
    if version != FORMAT:
        raise UnreadableMetadataError(
            f"{path} has format {version}, which another version of dcp_datastates has written; this one reads "
            f"format {FORMAT}: upgrade dcp_datastates"
        )
    return pickle_bytes, count
