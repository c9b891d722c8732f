"""Opens a source of any format, recognized by its content."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_datastates.checkpoints.formats import Format, format_of
from dcp_datastates.checkpoints.inventory import is_directory, names_at
from dcp_datastates.checkpoints.listing import committed_in
from dcp_datastates.conversion.files import read_whole
from dcp_datastates.conversion.read_safetensors import SafetensorsSource, is_safetensors, weights_in
from dcp_datastates.conversion.read_stock import StockSource
from dcp_datastates.conversion.read_torch import TorchSource, is_legacy_pickle, is_torch_file
from dcp_datastates.conversion.source import DCPSource, Source, Want
from dcp_datastates.dcp.read_requests import request_of
from dcp_datastates.errors import CheckpointNotFoundError, ForeignCheckpointError
from dcp_datastates.format.metadata_objects import metadata_of
from dcp_datastates.io.committed import explain_missing, open_committed
from dcp_datastates.io.engine import DEFAULT_HOST_CACHE_BYTES, engine
from dcp_datastates.io.requests import Request, aim
from dcp_datastates.io.restore import restore
from dcp_datastates.io.stored_checkpoint import StoredCheckpoint
from dcp_datastates.storage import presence
from dcp_datastates.storage.object_path import Location, ObjectPath, locate

__all__ = ["open_source"]


def open_source(path: str | os.PathLike[str] | ObjectPath, allow_objects: bool = False) -> Source:
    """Open what is at ``path``: a checkpoint of this package or of stock DCP, a Hugging Face folder, a safetensors
    file or a file of ``torch.save``.

    Reads names, shapes and dtypes, not the tensors' bytes. Runs no code from the checkpoint, unless ``allow_objects``.

    Raises:
        CheckpointNotFoundError: there is none of these; the message says what is there.
        CheckpointCorruptError, StorageError: it cannot be read.
        UnsafeObjectError: it cannot be read without running code from it.
        IncompatibleStateError, UnsupportedTensorError: it has values that cannot be converted.
        ConfigurationError: it is not clear what is meant.
    """
    found = locate(path)
    if is_directory(found):
        return _open_directory(found, allow_objects)
    if isinstance(found, Path) and presence.is_there(found) and not presence.is_file(found):
        raise ForeignCheckpointError(f"{str(found)!r} is neither a file nor a directory")
    try:
        first = read_whole(found, 9)
        if is_torch_file(first):
            return TorchSource(found, allow_objects)
        if is_safetensors(first):
            return SafetensorsSource(found, [found], None)
    except ForeignCheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"there is nothing at {str(found)!r}") from None
    if is_legacy_pickle(first):
        raise ForeignCheckpointError(
            f"{str(found)!r} is a pickle, perhaps of torch.save before torch 1.6; load it and save it again with a "
            f"newer torch.save"
        )
    raise ForeignCheckpointError(
        f"{str(found)!r} is neither a safetensors file nor a file of torch.save"
    )


def _open_directory(path: Location, allow_objects: bool) -> Source:
    found = format_of(path)
    if found is Format.DATASTATES:
        return DataStatesSource(path)
    if found in (Format.STOCK, Format.UNKNOWN):
        return StockSource(path, allow_objects)
    weights = weights_in(path)
    if weights is not None:
        return weights
    below = committed_in(path)
    others = sorted(names_at(path))
    there = (
        f"there are checkpoints below it, such as {below[-1].name!r}; pass the path of one"
        if below
        else f"the directory holds {len(others)} other entries, such as {others[0]!r}"
        if others
        else "the directory is empty"
    )
    raise CheckpointNotFoundError(f"no checkpoint of a known format at {str(path)!r}: {there}")


# ---- this package's own format -------------------------------------------------------------------


class DataStatesSource(DCPSource):
    """A committed checkpoint of this package."""

    format = "dcp_datastates"

    def __init__(self, path: Location) -> None:
        self.path = path
        committed = open_committed(path)
        self._table = committed.table
        self._engine = engine(DEFAULT_HOST_CACHE_BYTES)
        self._describe(metadata_of(committed.table))

    def fill(self, wants: Sequence[Want]) -> None:
        """See :class:`Source`."""
        requests = []
        for want in wants:
            chunks = self.chunks(want.name)
            for part in self.parts(want):
                item = ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(want.name),
                    dest_offsets=torch.Size(part.offsets),
                    storage_index=MetadataIndex(want.name, chunks[part.chunk].offsets, part.chunk),
                    storage_offsets=torch.Size(part.offsets),
                    lengths=torch.Size(part.sizes),
                )
                requests.append(request_of(item, self._metadata))
                aim(requests[-1], part.into, cast=False)
        self._restore(requests)

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        index, nothing = MetadataIndex(name), torch.Size([])
        item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        return self._restore([request_of(item, self._metadata)])

    def _restore(self, requests: list[Request]) -> bytes:
        data = bytearray()
        source = StoredCheckpoint(self._table, [self.path])
        try:
            restore(requests, source, self._engine, lambda request: data.extend(request.data))
        except CheckpointNotFoundError as error:
            raise explain_missing(self.path, source.note, error) from error
        return bytes(data)
