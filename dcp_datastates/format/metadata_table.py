"""The contents of a ``.metadata`` file, in columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_datastates.format.chunk_table import Catalog, FileRecord, Placement
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim

Trace = Mapping[str, Any] | None
"""The value of ``trace`` in the document."""

Document = Callable[[StorageMeta, Claim, Trace], bytes]
"""Makes the bytes of ``.metadata``, once the attempt is claimed and it is known what the save has cost."""

Compose = Callable[[Sequence[bytes]], Document]
"""Makes the document of all ranks' reports, which came with their votes."""


@dataclass(frozen=True)
class Note:
    """This package's note in the metadata of a checkpoint.

    ``after``: the newest attempt at the path or beside it when this one was claimed; None if unknown. ``metrics``: the
    numbers by which the user compares checkpoints. ``published_at``: when the metadata were written, right before the
    commit, in seconds since the epoch by the coordinator's clock. ``trace``: what each rank's part cost
    (``save_trace.py``, which checks it); None of a checkpoint that was converted.
    """

    attempt: Attempt
    files: Mapping[str, FileRecord]
    after: Attempt | None
    metrics: Mapping[str, float]
    published_at: float
    trace: Trace


@dataclass(frozen=True, eq=False)
class MetadataTable:
    """The contents of a ``.metadata`` file. ``placement.paths`` are the keys of ``note.files``, in order."""

    catalog: Catalog
    placement: Placement
    note: Note
    storage_meta: StorageMeta | None = None
