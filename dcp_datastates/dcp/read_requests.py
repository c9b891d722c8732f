"""The items of DCP's load plans, as what the engine reads."""

from __future__ import annotations

import io
from collections.abc import Iterable

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_datastates.errors import CheckpointCorruptError, IncompatibleStateError
from dcp_datastates.io.requests import Request, aim


def request_of(item: ReadItem, metadata: Metadata) -> Request:
    """What the item reads, by the checkpoint's ``metadata``, which a planner may have changed.

    Raises :class:`IncompatibleStateError` for an object that is to be loaded as a tensor,
    :class:`CheckpointCorruptError` if the metadata do not say where it is.
    """
    name = item.storage_index.fqn
    info = metadata.storage_data.get(item.storage_index)
    if not isinstance(info, _StorageInfo):
        raise CheckpointCorruptError(
            f"the metadata do not say where {item.storage_index} is stored"
        )
    request = Request(name, info.relative_path, info.offset, info.length, item)
    if item.type == LoadItemType.BYTE_IO:
        return request
    saved = metadata.state_dict_metadata[name]
    if not isinstance(saved, TensorStorageMetadata):
        raise IncompatibleStateError(f"{name!r} was saved as a Python object, not as a tensor")
    request.dtype = saved.properties.dtype
    request.chunk_sizes = tuple(_chunk(saved, item.storage_index).sizes)
    request.offsets, request.lengths = tuple(item.storage_offsets), tuple(item.lengths)
    return request


def aimed(
    items: Iterable[ReadItem], metadata: Metadata, planner: LoadPlanner, cast: bool
) -> list[Request]:
    """:func:`request_of` each, with the planner's destinations. Raises as that, and as :func:`aim`."""
    requests = [request_of(item, metadata) for item in items]
    tensors = [request for request in requests if request.dtype is not None]
    aim(tensors, [planner.resolve_tensor(request.key).detach() for request in tensors], cast)
    return requests


def deliver(planner: LoadPlanner, request: Request) -> None:
    """Give the planner what was read: of an object, the bytes that are its ``value``."""
    if request.target is None:
        planner.load_bytes(request.key, io.BytesIO(request.value))
    else:
        planner.commit_tensor(request.key, request.target)


def _chunk(saved: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    hint = index.index
    if hint is not None and hint < len(saved.chunks) and saved.chunks[hint].offsets == index.offset:
        return saved.chunks[hint]
    for chunk in saved.chunks:
        if chunk.offsets == index.offset:
            return chunk
    raise CheckpointCorruptError(f"the metadata have no chunk of {index.fqn!r} at {index.offset}")
