"""The ``.metadata`` file: DCP's own pickle, with a checksum behind it, read without running any of it.

The pickle is what stock DCP writes (``Metadata`` with ``_StorageInfo`` entries and relative paths),
so DCP's tools read it. Behind the pickle's end, where stock readers stop, stands a trailer::

    magic, 8 bytes · length of the pickle, u64 · CRC32C of the pickle, u32 · CRC32C of these 20 bytes, u32

What this package needs beyond stock is one plain dict in the ``Metadata`` object's ``__dict__``,
under ``dcp_datastates``.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata

from dcp_datastates._native import crc32c
from dcp_datastates.attempt import Attempt
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError

__all__ = ["FileRecord", "Note", "decode", "encode", "read_note"]

FORMAT_VERSION: Final = 1
_MAGIC: Final = b"DCPDST\x00\x01"
_TRAILER: Final = struct.Struct("<8sQII")
_NOTE: Final = "dcp_datastates"

_DTYPES: Final = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
# What DCP's default planners and this package put into a Metadata pickle, and nothing else.
_ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch": frozenset({"Size", *_DTYPES}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "Path"}),
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath", "Path"}),
}


@dataclass(frozen=True)
class FileRecord:
    """One data file of a checkpoint: what a reader must know before opening it. Sizes in bytes."""

    relative_path: str
    nbytes: int
    table_offset: int


@dataclass(frozen=True)
class Note:
    """What this package notes in the metadata of a checkpoint."""

    attempt: Attempt
    files: Mapping[str, FileRecord]


class _AllowListedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which checkpoint metadata never does"
        )


def encode(metadata: Metadata, note: Note) -> bytes:
    """The bytes of a ``.metadata`` file.

    Raises :class:`ConfigurationError` if ``metadata`` holds objects (a planner's data, say) that
    :func:`decode` would refuse: a checkpoint that cannot be opened must not be committed.
    """
    vars(metadata)[_NOTE] = {
        "version": FORMAT_VERSION,
        "attempt": note.attempt.name,
        "files": {
            record.relative_path: (record.nbytes, record.table_offset)
            for record in note.files.values()
        },
    }
    data = pickle.dumps(metadata)
    try:
        _AllowListedUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise ConfigurationError(
            f"the checkpoint's metadata could not be opened again: {error}; a planner must keep its "
            f"planner_data to plain dicts, lists, tuples, strings and numbers"
        ) from error
    head = _TRAILER.pack(_MAGIC, len(data), crc32c(data), 0)[:-4]
    return data + head + struct.pack("<I", crc32c(head))


def decode(data: bytes, path: Path) -> Metadata:
    """The Metadata object in the bytes of the ``.metadata`` file at ``path``.

    Raises :class:`CheckpointCorruptError` if the bytes are not whole, or name anything but the plain
    data types of DCP metadata; nothing that they name is run.
    """
    if len(data) < _TRAILER.size or data[-_TRAILER.size :][:8] != _MAGIC:
        raise CheckpointCorruptError(
            f"{path}: no checksum trailer; the file is cut short, damaged, or was not written by "
            f"dcp_datastates (torch.distributed.checkpoint.FileSystemReader loads stock checkpoints)"
        )
    trailer = data[-_TRAILER.size :]
    _, length, checksum, own = _TRAILER.unpack(trailer)
    body = memoryview(data)[: -_TRAILER.size]
    if crc32c(trailer[:-4]) != own or length != len(body) or crc32c(body) != checksum:
        raise CheckpointCorruptError(f"{path}: checksum mismatch; the metadata file is damaged")
    try:
        metadata = _AllowListedUnpickler(io.BytesIO(body)).load()
    except Exception as error:  # a crafted pickle can raise anything
        raise CheckpointCorruptError(f"{path}: not checkpoint metadata: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointCorruptError(f"{path}: holds a {type(metadata).__name__}, not Metadata")
    return metadata


def read_note(metadata: Metadata, path: Path) -> Note:
    """What this package noted in ``metadata``; :class:`CheckpointCorruptError` if that is malformed."""
    try:
        note = vars(metadata)[_NOTE]
        version = note["version"]
        attempt = Attempt.parse(note["attempt"])
        files = {
            str(name): FileRecord(str(name), int(nbytes), int(table_offset))
            for name, (nbytes, table_offset) in note["files"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorruptError(
            f"{path}: malformed notes of dcp_datastates: {error!r}"
        ) from error
    if version != FORMAT_VERSION or attempt is None:
        raise CheckpointCorruptError(
            f"{path}: format version {version!r}, attempt {note['attempt']!r}; this release reads "
            f"version {FORMAT_VERSION}: a newer dcp_datastates may be needed"
        )
    for name in files:
        if name.startswith("/") or ".." in Path(name).parts:
            raise CheckpointCorruptError(f"{path}: data file {name!r} lies outside the checkpoint")
    return Note(attempt, files)
