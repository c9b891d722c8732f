"""The bytes of ``.metadata`` of a save that DCP's objects describe: a planner's metadata, and all ranks' write results.

The metadata of a plan in columns are ``planning/global_plan.py``'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_datastates.format.metadata import TRANSFORM_DESCRIPTORS, encode
from dcp_datastates.format.metadata_objects import table_of
from dcp_datastates.format.metadata_table import FileRecord, Note, Trace
from dcp_datastates.planning.exchange import Report
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim


def write_results(
    items: Sequence[WriteItem], report: Report, attempt: Attempt
) -> list[WriteResult]:
    """A rank's results: one for each file (:class:`FileRecord`), and one for each item, with its place."""
    paths = [f"{attempt.name}/{name}" for name, _, _ in report.files]
    results = []
    for number, (_, nbytes, table_offset) in enumerate(report.files):
        first, record = (
            np.argmax(report.numbers == number),
            FileRecord(paths[number], nbytes, table_offset),
        )
        results.append(WriteResult(items[int(first)].index, nbytes, record))
    places = (report.numbers.tolist(), report.offsets.tolist(), report.lengths.tolist())
    for item, number, offset, length in zip(items, *places, strict=True):
        info = _StorageInfo(paths[number], offset, length, TRANSFORM_DESCRIPTORS)
        results.append(WriteResult(item.index, length, info))
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
