"""Process groups that come and go within one process, one default group per test."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor


def initialize(store: Any, rank: int, world: int, timeout: float) -> None:
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )


def destroy() -> None:
    """End the default group and forget what torch cached about meshes over it."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_native is not None:
        clear_native()


def own_group() -> dist.ProcessGroup:
    """A gloo group for checkpoints alone: DCP must not share the one that training uses."""
    return dist.new_group(backend="gloo")


def gathered(value: Any) -> list[Any]:
    """The value of each rank, on all of them."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def forbid_collectives(patch: pytest.MonkeyPatch) -> None:
    """From now on a collective of the training job, or a new group, is an AssertionError."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective")

    for name in (
        *("all_reduce", "broadcast", "barrier", "all_gather", "gather", "scatter", "new_group"),
        *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    ):
        patch.setattr(distributed_c10d, name, forbidden)
        patch.setattr(dist, name, forbidden)
