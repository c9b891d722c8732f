"""The table behind the pickle in a ``.metadata`` file, and the checksum over all of the file.

Format 2. Integers are little-endian, except for the number of the format:

1. The file is a pickle, then the columns, then the directory, then the end. Nothing lies between them.
2. The end is the last 24 bytes of the file:

   ====== ==== ==========================================================
   offset size
   ====== ==== ==========================================================
   0      6    ``DCPDST``
   6      2    the format, big-endian: 2
   8      8    length of the pickle; the columns begin there
   16     4    how many columns there are: 13
   20     4    CRC32C of all bytes of the file before these four
   ====== ==== ==========================================================

3. The directory has nine bytes for each column, in order: the bytes of a value (1, 2, 4 or 8), and how many values
   there are (8 bytes).
4. The columns follow one another without padding, in the order of the directory. Values of 1, 2 and 4 bytes are
   unsigned, those of 8 bytes are signed. A writer takes the smallest size that all values fit in.
5. The first column, ``document``, has values of one byte: JSON in UTF-8 (:mod:`dcp_datastates.format.metadata`). The
   others are those of :data:`CATALOG` and :data:`PLACEMENT`: ``Catalog`` and ``Placement`` in
   :mod:`dcp_datastates.format.chunk_table` say what they hold.

In every format from 2 on the end lies in the last 24 bytes, its first eight bytes mean the same, and its last four
are the checksum. So a reader can tell a file of a later format from a damaged one. (Format 1 had the same first eight
bytes, and behind them a CRC32C of the pickle and one of the end.)

Reading takes time and memory in proportion to the file: nothing is allocated by a number before the bytes that it
counts are known to be there.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp_datastates._native import crc32c
from dcp_datastates.errors import CheckpointCorruptError, UnreadableMetadataError
from dcp_datastates.format.chunk_table import Catalog, Ints, Placement

__all__ = ["CATALOG", "FORMAT", "PLACEMENT", "append", "parse"]

FORMAT: Final = 2

CATALOG: Final = ("properties", "ndims", "shapes", "counts", "offsets", "sizes")
PLACEMENT: Final = (
    *("chunk_files", "chunk_offsets", "chunk_lengths"),
    *("object_files", "object_offsets", "object_lengths"),
)
_COLUMNS: Final = CATALOG + PLACEMENT
"""The columns behind the document, in order."""

_MAGIC: Final = b"DCPDST"
_END: Final = struct.Struct("<6s2sQII")
_CHECKSUM: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<BQ")
_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    width: np.dtype(f"<{kind}{width}") for width, kind in ((1, "u"), (2, "u"), (4, "u"), (8, "i"))
}


def append(pickled: bytes, document: bytes, catalog: Catalog, placement: Placement) -> bytes:
    """A whole file: ``pickled``, and behind it the table."""
    columns = [getattr(catalog, name) for name in CATALOG]
    columns += [getattr(placement, name) for name in PLACEMENT]
    packed = [np.frombuffer(document, np.uint8), *map(_narrow, columns)]
    parts: list[bytes | memoryview] = [pickled, *(column.data for column in packed)]
    parts += [_ENTRY.pack(column.itemsize, len(column)) for column in packed]
    number = FORMAT.to_bytes(2, "big")
    parts.append(_END.pack(_MAGIC, number, len(pickled), len(packed), 0)[: -_CHECKSUM.size])
    checksum = 0
    for part in parts:
        checksum = crc32c(part, checksum)
    return b"".join((*parts, _CHECKSUM.pack(checksum)))


def parse(data: bytes, path: Path) -> tuple[bytes, dict[str, Ints]]:
    """The document and the columns in the bytes of the file at ``path``, which are whole.

    Nothing is said of what the columns hold. Raises :class:`CheckpointCorruptError` if the bytes are damaged, and
    :class:`UnreadableMetadataError` if they are whole and of another format.
    """
    pickle_bytes, count = _end(data, path)
    directory = len(data) - _END.size - count * _ENTRY.size
    if count != 1 + len(_COLUMNS) or directory < pickle_bytes:
        raise UnreadableMetadataError(f"{path}: not checkpoint metadata: it has {count} columns")
    entries = list(_ENTRY.iter_unpack(data[directory : len(data) - _END.size]))
    if {width for width, _ in entries} - _DTYPES.keys() or entries[0][0] != 1:
        raise UnreadableMetadataError(f"{path}: not checkpoint metadata: a column has no type")
    if sum(width * length for width, length in entries) != directory - pickle_bytes:
        raise UnreadableMetadataError(
            f"{path}: not checkpoint metadata: its columns do not fill the table"
        )
    at = pickle_bytes
    found = []
    for width, length in entries:
        found.append(np.frombuffer(data, _DTYPES[width], length, at))
        at += width * length
    columns = [column.astype(np.int64) for column in found[1:]]
    return found[0].tobytes(), dict(zip(_COLUMNS, columns, strict=True))


def _end(data: bytes, path: Path) -> tuple[int, int]:
    """Of a whole file of this format, the bytes of its pickle and how many columns it says it has."""
    end = data[-_END.size :]
    if len(end) < _END.size or not end.startswith(_MAGIC):
        raise CheckpointCorruptError(
            f"{path}: no checksums at its end; the file is cut short, damaged, or was not written by "
            f"dcp_datastates (torch.distributed.checkpoint.FileSystemReader loads stock checkpoints)"
        )
    _, number, pickle_bytes, count, checksum = _END.unpack(end)
    version = int.from_bytes(number, "big")
    covered = memoryview(data)[: -_CHECKSUM.size]
    if version == 1:  # its last checksum covers the end alone
        covered = memoryview(end)[: -_CHECKSUM.size]
    if version == 0 or crc32c(covered) != checksum:
        raise CheckpointCorruptError(f"{path}: checksum mismatch; the metadata file is damaged")
    if version < FORMAT:
        raise UnreadableMetadataError(
            f"{path} has format {version}, which no released version of dcp_datastates has written; this one reads "
            f"format {FORMAT}. The tensors are in safetensors files, in the directory of the attempt beside it: "
            f"torch.distributed.checkpoint.HuggingFaceStorageReader reads that"
        )
    if version > FORMAT:
        raise UnreadableMetadataError(
            f"{path} has format {version}, which a later version of dcp_datastates has written; this one reads "
            f"format {FORMAT}: upgrade dcp_datastates"
        )
    return pickle_bytes, count


def _narrow(values: Ints) -> npt.NDArray[Any]:
    """The same values, in the fewest bytes."""
    most = int(values.max(initial=0)) if values.min(initial=0) >= 0 else 1 << 62
    return values.astype(_DTYPES[next((width for width in (1, 2, 4) if most < 1 << 8 * width), 8)])
