"""The bytes of ``.metadata``, made from the plan and all ranks' results, for the coordinator to publish.

The results of a save that this package runs travel with the ranks' votes: :func:`encode_results`, :func:`composer`.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from dcp_datastates.commit.round import Compose, Document
from dcp_datastates.format.metadata import FileRecord, MetadataTable, Note, encode
from dcp_datastates.format.metadata_columns import table_of
from dcp_datastates.planning.exchange import RankReport
from dcp_datastates.planning.plan_cache import PlannedMetadata
from dcp_datastates.storage.claims import Claim

__all__ = ["DCP_VERSION", "composer", "document", "encode_results"]

DCP_VERSION: Final = "1.0.0"
"""The value that stock DCP of torch 2.11 to 2.13 writes as ``Metadata.version``."""


def encode_results(results: Sequence[Any]) -> bytes:
    """A rank's results: the one :class:`RankReport` of a planner that knows this package, or DCP's write results."""
    if len(results) == 1 and isinstance(results[0], RankReport):
        return results[0].encode()
    return pickle.dumps(results)


def _decode_results(report: bytes) -> list[Any]:
    # Pickled by a rank of this job.
    return [RankReport.decode(report)] if RankReport.is_encoded(report) else pickle.loads(report)


def composer(
    metadata: Metadata, directory: str, attempt: str, metrics: Mapping[str, float]
) -> Compose:
    """Coordinator: makes the document of a save from the planner's metadata and all ranks' encoded results.

    It raises what ``PlannedMetadata.consolidate`` raises.
    """
    # The planner may use its own for the next save meanwhile.
    mine = metadata if isinstance(metadata, PlannedMetadata) else copy.copy(metadata)

    def compose(reports: Sequence[bytes]) -> Document:
        results = list(map(_decode_results, reports))
        if isinstance(mine, PlannedMetadata):
            mine.consolidate(results, directory, attempt)
        return lambda meta, claim: document(meta, claim, mine, results, metrics)

    return compose


def document(
    meta: StorageMeta,
    claim: Claim,
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    metrics: Mapping[str, float],
) -> bytes:
    """The bytes of ``.metadata``. Completes ``metadata`` in place, unless it is a :class:`PlannedMetadata`.

    Args:
        meta: DCP's description of the storage.
        claim: how the attempt was claimed.
        metadata: the planner's metadata.
        results: every rank's results of ``write_data``.
        metrics: the numbers by which the user compares checkpoints.

    Raises :class:`ConfigurationError` if the metadata contain a value that could not be read back.
    """
    if isinstance(metadata, PlannedMetadata):
        return _planned_document(meta, claim, metadata, metrics)
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
    metadata.version = DCP_VERSION
    return encode(table_of(metadata, Note(claim.attempt, files, claim.after, metrics, time.time())))


def _planned_document(
    meta: StorageMeta, claim: Claim, metadata: PlannedMetadata, metrics: Mapping[str, float]
) -> bytes:
    attempt = claim.attempt
    files = {}
    for report in metadata.reports:
        for name, nbytes, table_offset in report.files:
            path = f"{attempt.name}/{name}"
            files[path] = FileRecord(path, nbytes, table_offset)
    return encode(
        MetadataTable(
            metadata.global_plan.catalog,
            metadata.global_plan.placement(metadata.reports, attempt.name),
            Note(attempt, files, claim.after, metrics, time.time()),
            meta,
            DCP_VERSION,
        )
    )
