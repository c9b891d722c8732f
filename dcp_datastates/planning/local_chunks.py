"""The tensor of a write item: the chunk that this rank holds, or a slice of its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from dcp_datastates.errors import DataStatesError
from dcp_datastates.io.shards import holds_shards, shard_with

__all__ = ["chunk_of"]


def chunk_of(value: Any, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
    """The live tensor of ``value``, which has this name in the flattened state, or those of its rows that ``chunk``
    names.

    Raises :class:`DataStatesError` for a chunk that this rank does not hold.
    """
    if isinstance(value, ShardedTensor) or holds_shards(value):
        tensor, begin = _shard_with(value, chunk.offsets)
    else:
        tensor, begin = value.to_local() if isinstance(value, DTensor) else value, 0
        if tensor.shape != chunk.sizes and tensor.dim():
            begin = chunk.offsets[0] - _first_row(value, name, chunk.offsets)
    if tensor.shape != chunk.sizes and tensor.dim() and tensor.numel():
        tensor = tensor.narrow(0, begin, chunk.sizes[0])
    return tensor


def _first_row(value: Any, name: str, offsets: torch.Size) -> int:
    """The first row, in the full tensor, of this rank's chunk that contains the row ``offsets[0]``."""
    for item in create_default_local_save_plan({name: value}, True).items:
        if item.tensor_data is not None:
            held = item.tensor_data.chunk
            if (
                held.offsets[0] <= offsets[0] < held.offsets[0] + held.sizes[0]
                and held.offsets[1:] == offsets[1:]
            ):
                return int(held.offsets[0])
    raise DataStatesError(f"this rank does not hold row {offsets[0]} of {name!r}")


def _shard_with(
    tensor: ShardedTensor | torch.Tensor, offsets: torch.Size
) -> tuple[torch.Tensor, int]:
    """The shard that contains the chunk at ``offsets``, and the chunk's first row in the shard."""
    if not isinstance(tensor, ShardedTensor):
        found = shard_with(tensor, offsets)
        if found is not None:
            return found
        raise DataStatesError(f"this rank holds no shard at {tuple(offsets)}")
    for shard in tensor.local_shards():
        starts, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        if tuple(starts) == tuple(offsets):
            return shard.tensor, 0
        if (
            starts
            and tuple(starts[1:]) == tuple(offsets[1:])
            and starts[0] <= offsets[0] < starts[0] + sizes[0]
        ):
            return shard.tensor, int(offsets[0] - starts[0])
    raise DataStatesError(f"this rank holds no shard at {tuple(offsets)}")
