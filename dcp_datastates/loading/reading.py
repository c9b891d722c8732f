"""Reads from a checkpoint that was opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dcp_datastates._native import Engine
from dcp_datastates.errors import CheckpointNotFoundError
from dcp_datastates.format.metadata_table import MetadataTable
from dcp_datastates.io.committed import explain_missing
from dcp_datastates.io.engine import DEFAULT_HOST_CACHE_BYTES, engine
from dcp_datastates.io.requests import Request
from dcp_datastates.io.restore import Sharing, StoredCheckpoint, restore
from dcp_datastates.staging.step_gate import release_memory
from dcp_datastates.storage.object_path import Location


def read(
    requests: list[Request],
    deliver: Callable[[Request], None],
    table: MetadataTable,
    places: Sequence[Location],
    *,
    sharing: Sharing | None = None,
    count: Callable[[int], None] = lambda nbytes: None,
    native: Engine | None = None,
) -> None:
    """:func:`~dcp_datastates.io.restore.restore`, from the nearest of the ``places``, once no save in flight reads the
    memory that it overwrites. A data file that is missing is damage, or another save's doing, and the error says which.

    ``native``: the engine; None: the process's own, of the usual size.
    """
    source = StoredCheckpoint(table, places, sharing)
    try:
        native = native or engine(DEFAULT_HOST_CACHE_BYTES)
        restore(requests, source, native, deliver, _release, count)
    except CheckpointNotFoundError as error:
        raise explain_missing(places[0], table.note, error) from error


def _release(storages: set[torch.UntypedStorage]) -> None:
    release_memory(storages, "a load")
