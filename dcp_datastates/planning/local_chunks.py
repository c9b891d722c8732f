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

__all__ = ["LocalChunks"]


class LocalChunks:
    """The chunks of tensors that this rank holds.

    Args:
        state: the flattened state. It must not change until the last call of :meth:`tensor`.
        is_coordinator: whether this rank's default plan includes the values that all ranks hold.
    """

    def __init__(self, state: dict[str, Any], is_coordinator: bool) -> None:
        self._state = state
        self._is_coordinator = is_coordinator
        self._held: dict[str, list[tuple[torch.Size, torch.Size]]] | None = None

    def tensor(self, fqn: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """The live tensor, or those of its rows that ``chunk`` names.

        Raises :class:`DataStatesError` for a chunk that this rank does not hold.
        """
        whole = self._state[fqn]
        if isinstance(whole, ShardedTensor) or holds_shards(whole):
            tensor, begin = _shard_with(whole, chunk.offsets)
        else:
            tensor = whole.to_local() if isinstance(whole, DTensor) else whole
            begin = 0
            if tensor.shape != chunk.sizes and tensor.dim():
                begin = chunk.offsets[0] - self._first_row(fqn, chunk.offsets)
        if tensor.shape != chunk.sizes and tensor.dim() and tensor.numel():
            tensor = tensor.narrow(0, begin, chunk.sizes[0])
        return tensor

    def _first_row(self, fqn: str, offsets: torch.Size) -> int:
        """The first row, in the full tensor, of this rank's chunk that contains the row ``offsets[0]``."""
        if self._held is None:
            local = create_default_local_save_plan(self._state, self._is_coordinator)
            self._held = {}
            for item in local.items:
                if item.tensor_data is not None:
                    chunk = item.tensor_data.chunk
                    self._held.setdefault(item.index.fqn, []).append((chunk.offsets, chunk.sizes))
        for starts, sizes in self._held[fqn]:
            if starts[0] <= offsets[0] < starts[0] + sizes[0] and tuple(starts[1:]) == tuple(
                offsets[1:]
            ):
                return int(starts[0])
        raise DataStatesError(f"this rank does not hold row {offsets[0]} of {fqn!r}")


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
