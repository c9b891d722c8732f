"""``ShardedTensor``, which FSDP1 makes: saved as it was at the call, several shards per rank included."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import assert_same, async_save, load_by_both, load_everything
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards

_ROWS, _COLUMNS = 48, 500


def _sharded(value: torch.Tensor, shards_per_rank: int) -> ShardedTensor:
    """Rows of ``value`` in turn: shard ``n`` belongs to rank ``n % world size``."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = _ROWS // (world * shards_per_rank)
    shards = [
        Shard.from_tensor_and_offsets(
            value[number * rows : (number + 1) * rows].clone(), [number * rows, 0], rank
        )
        for number in range(rank, world * shards_per_rank, world)
    ]
    return init_from_local_shards(shards, [_ROWS, _COLUMNS])


@ranks(4)
def test_a_sharded_tensor_is_saved_as_it_was_and_loads_into_other_shards(shared_dir):
    value = torch.arange(float(_ROWS * _COLUMNS)).view(_ROWS, _COLUMNS)
    for shards_per_rank in (1, 3):
        path = shared_dir / str(shards_per_rank)
        tensor = _sharded(value, shards_per_rank)
        future = async_save({"t": tensor}, path, group=own_group())
        for shard in tensor.local_shards():
            shard.tensor.zero_()
        future.result(60)
        target = _sharded(torch.zeros_like(value), 2)
        load_by_both({"t": target}, path)
        for shard in target.local_shards():
            start = shard.metadata.shard_offsets[0]
            assert_same(shard.tensor, value[start : start + shard.tensor.shape[0]])
        dist.barrier()
        assert_same(load_everything(path), {"t": value})
