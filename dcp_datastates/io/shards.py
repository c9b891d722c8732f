"""Plain tensors that say of which larger tensor they hold which shards: ``CheckpointableTensor``, from torch 2.15 on.

They say it in four attributes, which a copy or an alias does not have unless it is given them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

try:
    protocol: Any = importlib.import_module("torch.distributed.checkpoint.protocol")
except ImportError:  # before 2.15
    protocol = None
_CheckpointableTensor: Final[Any] = getattr(protocol, "CheckpointableTensor", None)

__all__ = ["any_hold_shards", "holds_shards", "shard_with", "take_shards_of"]

_ATTRIBUTES: Final = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def holds_shards(tensor: torch.Tensor) -> bool:
    """Whether DCP takes ``tensor`` for shards of a larger one."""
    return (
        _CheckpointableTensor is not None
        and hasattr(tensor, "global_shape")  # asking the protocol takes longer
        and isinstance(tensor, _CheckpointableTensor)
    )


def any_hold_shards(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of them does."""
    return _CheckpointableTensor is not None and any(map(holds_shards, tensors))


def take_shards_of(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """``copied``, which holds the shards that ``tensor`` holds, if that holds any."""
    if holds_shards(tensor):
        for name in _ATTRIBUTES:
            setattr(copied, name, getattr(tensor, name))
    return copied


def shard_with(tensor: Any, offsets: Sequence[int]) -> tuple[torch.Tensor, int] | None:
    """The shard in ``tensor`` with the chunk at ``offsets``, and that chunk's first row in it; None if it has none."""
    for starts, within, sizes in zip(
        tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True
    ):
        if tuple(starts[1:]) == tuple(offsets[1:]) and (
            not starts or starts[0] <= offsets[0] < starts[0] + max(sizes[0], 1)
        ):
            box = tuple(slice(at, at + size) for at, size in zip(within, sizes, strict=True))
            return tensor[box], int(offsets[0] - starts[0]) if starts else 0
    return None
