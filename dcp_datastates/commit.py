"""Publishing: the one moment at which a save becomes a checkpoint.

The coordinator comes here when every rank's bytes and directory entries are on stable storage (DCP has
gathered every rank's results, and a rank gives its result only then). In order: the new ``.metadata`` is
made durable under a temporary name, renamed, its directory synced; only then is anything old removed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from dcp_datastates.attempt import Attempt
from dcp_datastates.metadata import FileRecord, Note, encode
from dcp_datastates.storage import local

__all__ = ["commit", "discard"]

logger = logging.getLogger(__name__)

DCP_VERSION = "1.0.0"
"""What stock DCP of torch 2.11 to 2.13 notes as ``Metadata.version``."""


def commit(
    directory: Path,
    attempt: Attempt,
    metadata: Metadata,
    storage_meta: StorageMeta,
    results: Iterable[Sequence[WriteResult]],
) -> None:
    """Complete ``metadata`` from all ranks' results, publish it, and remove older attempts.

    Raises :class:`~dcp_datastates.errors.StorageError`; then the checkpoint at ``directory`` is the
    one that was there before.
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
    metadata.storage_meta = storage_meta
    metadata.version = DCP_VERSION
    local.publish(directory, attempt, encode(metadata, Note(attempt, files)))
    for older in local.attempts(directory):
        if older < attempt:
            discard(directory, older)


def discard(directory: Path, attempt: Attempt) -> None:
    """Remove what an attempt left that is not, or no longer, the committed one. Never raises."""
    logger.debug("removing attempt %s of %s", attempt.name, directory)
    local.remove_attempt(directory, attempt)
