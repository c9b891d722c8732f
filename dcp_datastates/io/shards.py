"""Plain tensors with attributes that describe the shards they hold: ``CheckpointableTensor``, from torch 2.15 on.

There are four attributes. Copies and aliases do not inherit them.
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
    """Whether DCP treats ``tensor`` as shards of a larger tensor."""
    return (
        _CheckpointableTensor is not None
        and hasattr(tensor, "global_shape")  # faster than an isinstance() check of the protocol
        and isinstance(tensor, _CheckpointableTensor)
    )


def any_hold_shards(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of ``tensors`` holds shards."""
    return _CheckpointableTensor is not None and any(map(holds_shards, tensors))


def take_shards_of(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Give ``copied`` the shard attributes of ``tensor``, if it has any; returns ``copied``."""
    if holds_shards(tensor):
        for name in _ATTRIBUTES:
            setattr(copied, name, getattr(tensor, name))
    return copied


def shard_with(tensor: Any, offsets: Sequence[int]) -> tuple[torch.Tensor, int] | None:
    """The shard in ``tensor`` that contains the chunk at ``offsets``, and the chunk's first row in the shard; None if
    there is none.
    """
    for starts, within, sizes in zip(
        tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True
    ):
        if tuple(starts[1:]) == tuple(offsets[1:]) and (
            not starts or starts[0] <= offsets[0] < starts[0] + max(sizes[0], 1)
        ):
            box = tuple(slice(at, at + size) for at, size in zip(within, sizes, strict=True))
            return tensor[box], int(offsets[0] - starts[0]) if starts else 0
    return None
