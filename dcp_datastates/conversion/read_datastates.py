"""Reads checkpoints of this package, verified: every byte is compared with its checksum before it is used."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_datastates.conversion.source import DCPSource, Want
from dcp_datastates.dcp.reader import explain_missing
from dcp_datastates.errors import CheckpointNotFoundError
from dcp_datastates.format.metadata_objects import metadata_of
from dcp_datastates.io.committed import open_committed
from dcp_datastates.io.engine import DEFAULT_HOST_CACHE_BYTES, engine
from dcp_datastates.io.restore import restore
from dcp_datastates.io.stored_checkpoint import StoredCheckpoint
from dcp_datastates.storage.object_path import Location

__all__ = ["DataStatesSource"]


class DataStatesSource(DCPSource):
    """A committed checkpoint of this package."""

    format = "dcp_datastates"

    def __init__(self, path: Location) -> None:
        self.path = path
        committed = open_committed(path)
        self._note = committed.note
        self._engine = engine(DEFAULT_HOST_CACHE_BYTES)
        self._describe(metadata_of(committed.table))

    def fill(self, wants: Sequence[Want]) -> None:
        """See :class:`Source`."""
        planner = _Planner()
        items = []
        for want in wants:
            chunks = self.chunks(want.name)
            for part in self.parts(want):
                items.append(
                    ReadItem(
                        type=LoadItemType.TENSOR,
                        dest_index=MetadataIndex(want.name, index=len(planner.targets)),
                        dest_offsets=torch.Size(part.offsets),
                        storage_index=MetadataIndex(
                            want.name, chunks[part.chunk].offsets, part.chunk
                        ),
                        storage_offsets=torch.Size(part.offsets),
                        lengths=torch.Size(part.sizes),
                    )
                )
                planner.targets.append(part.into)
        self._restore(items, planner)

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        planner = _Planner()
        index = MetadataIndex(name)
        nothing = torch.Size([])
        item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        self._restore([item], planner)
        return planner.data

    def _restore(self, items: list[ReadItem], planner: _Planner) -> None:
        try:
            restore(
                LoadPlan(items),
                planner,  # type: ignore[arg-type]
                StoredCheckpoint(self._metadata, self._note, [self.path]),
                self._engine,
                cast=False,
            )
        except CheckpointNotFoundError as error:
            raise explain_missing(self.path, self._note, error) from error


class _Planner:
    """The part of a load planner that :func:`restore` asks: the destination of each item."""

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []
        self.data = b""

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        assert item.dest_index.index is not None
        return self.targets[item.dest_index.index]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """There is nothing left to do."""

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> Any:
        self.data = value.getvalue()
