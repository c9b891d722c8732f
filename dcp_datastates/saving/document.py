"""The bytes of ``.metadata`` of a save that DCP's objects describe: a planner's metadata, and all ranks' reports.

The metadata of a plan in columns are ``planning/global_plan.py``'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from dcp_datastates.format.metadata import TRANSFORM_DESCRIPTORS, encode
from dcp_datastates.format.metadata_objects import table_of
from dcp_datastates.format.metadata_table import FileRecord, Note, Trace
from dcp_datastates.planning.messages import Report
from dcp_datastates.storage.claims import Claim


def document(
    meta: StorageMeta,
    claim: Claim,
    metadata: Metadata,
    reports: Iterable[tuple[Sequence[MetadataIndex], Report]],
    metrics: Mapping[str, float],
    trace: Trace = None,
) -> bytes:
    """The bytes of ``.metadata``. Completes ``metadata`` in place.

    Args:
        meta: DCP's description of the storage.
        claim: how the attempt was claimed.
        metadata: the planner's metadata.
        reports: of every rank, its items' indices, and where they are.
        metrics: the numbers by which the user compares checkpoints.
        trace: what the save has cost so far.

    Raises :class:`ConfigurationError` if the metadata contain a value that could not be read back.
    """
    files: dict[str, FileRecord] = {}
    metadata.storage_data = {}
    for indices, report in reports:
        paths = [f"{claim.attempt.name}/{name}" for name, _, _ in report.files]
        for path, (_, nbytes, table_offset) in zip(paths, report.files, strict=True):
            files[path] = FileRecord(path, nbytes, table_offset)
        places = (report.numbers.tolist(), report.offsets.tolist(), report.lengths.tolist())
        for index, number, offset, length in zip(indices, *places, strict=True):
            info = _StorageInfo(paths[number], offset, length, TRANSFORM_DESCRIPTORS)
            metadata.storage_data[index] = info
    metadata.storage_meta = meta
    note = Note(claim.attempt, files, claim.after, metrics, time.time(), trace)
    return encode(table_of(metadata, note))
