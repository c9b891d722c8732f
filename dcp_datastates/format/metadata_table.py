"""The contents of a ``.metadata`` file, in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from dcp_datastates.format.chunk_table import Catalog, FileRecord, Ints, Placement
from dcp_datastates.storage.attempt import Attempt

__all__ = ["CARRIED", "Further", "MetadataTable", "Note", "rows_of"]


@dataclass(frozen=True)
class Note:
    """This package's note in the metadata of a checkpoint.

    ``after``: the newest attempt at the path or beside it when this one was claimed; None if unknown. ``metrics``: the
    numbers by which the user compares checkpoints. ``published_at``: when the metadata were written, right before the
    commit, in seconds since the epoch by the coordinator's clock; None in checkpoints of older versions.
    """

    attempt: Attempt
    files: Mapping[str, FileRecord]
    after: Attempt | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    published_at: float | None = None


@dataclass(frozen=True, eq=False)
class Further:
    """A field that not every torch has, of one of DCP's classes whose instances are in columns."""

    kind: str
    field: str
    values: tuple[Any, ...]
    rows: Ints
    """For each instance (:func:`rows_of`) the index of its value; -1 if it has none."""


@dataclass(frozen=True, eq=False)
class MetadataTable:
    """The contents of a ``.metadata`` file. ``placement.paths`` are the keys of ``note.files``, in order."""

    catalog: Catalog
    placement: Placement
    note: Note
    storage_meta: StorageMeta | None = None
    version: str | None = None
    further: Sequence[Further] = ()


CARRIED: Final[Mapping[str, type]] = {
    kind.__name__: kind
    for kind in (
        Metadata,
        TensorStorageMetadata,
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MetadataIndex,
        _StorageInfo,
    )
}
"""The classes whose instances are in columns. The document stores the new fields of all other classes directly."""


def rows_of(kind: str, table: MetadataTable) -> int:
    """The number of instances in the column of a new field of class ``kind``."""
    if kind == "Metadata":
        return 1
    if kind in ("TensorStorageMetadata", "BytesStorageMetadata"):
        return len(table.catalog.names)  # tensors and objects: each class uses only its rows
    chunks = len(table.placement.chunk_files)
    return chunks if kind == "ChunkStorageMetadata" else chunks + len(table.placement.object_files)
