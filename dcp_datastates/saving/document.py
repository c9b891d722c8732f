"""The bytes of ``.metadata`` of a save that DCP's objects describe: a planner's metadata, and all ranks' write results.

The metadata of a plan in columns are ``planning/global_plan.py``'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_datastates.format.layout import FileLayout, SealedFile
from dcp_datastates.format.metadata import TRANSFORM_DESCRIPTORS, FileRecord, Note, encode
from dcp_datastates.format.metadata_columns import table_of
from dcp_datastates.format.metadata_table import Trace
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim

__all__ = ["document", "write_results"]


def write_results(
    items: Sequence[WriteItem],
    layouts: Sequence[FileLayout],
    sealed: Sequence[SealedFile],
    attempt: Attempt,
) -> list[WriteResult]:
    """A rank's results: one for each item, with its place, and one for each file (:class:`FileRecord`)."""
    results = []
    for layout, file in zip(layouts, sealed, strict=True):
        path = f"{attempt.name}/{layout.name}"
        record = FileRecord(path, file.nbytes, file.table_offset)
        first = items[(layout.tensors or layout.objects)[0].item]
        results.append(WriteResult(first.index, file.nbytes, record))
        for entry in layout.tensors:
            info = _StorageInfo(path, entry.offset, entry.nbytes, TRANSFORM_DESCRIPTORS)
            results.append(WriteResult(items[entry.item].index, entry.nbytes, info))
        for element, offset, size in zip(
            layout.objects, file.object_offsets, file.object_sizes, strict=True
        ):
            info = _StorageInfo(path, offset, size, TRANSFORM_DESCRIPTORS)
            results.append(WriteResult(items[element.item].index, size, info))
    return results


def document(
    meta: StorageMeta,
    claim: Claim,
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    metrics: Mapping[str, float],
    trace: Trace = None,
) -> bytes:
    """The bytes of ``.metadata``. Completes ``metadata`` in place.

    Args:
        meta: DCP's description of the storage.
        claim: how the attempt was claimed.
        metadata: the planner's metadata.
        results: every rank's results.
        metrics: the numbers by which the user compares checkpoints.
        trace: what the save has cost so far.

    Raises :class:`ConfigurationError` if the metadata contain a value that could not be read back.
    """
    files: dict[str, FileRecord] = {}
    storage_data: dict[object, _StorageInfo] = {}
    for rank_results in results:
        for result in rank_results:
            if isinstance(result.storage_data, FileRecord):
                files[result.storage_data.relative_path] = result.storage_data
            else:
                storage_data[result.index] = result.storage_data
    metadata.storage_data = storage_data
    metadata.storage_meta = meta
    note = Note(claim.attempt, files, claim.after, metrics, time.time(), trace)
    return encode(table_of(metadata, note))
