"""A state that looks almost as it did at the save before: what is remembered of that must not be used."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import CACHE, load
from support.ranks import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesSavePlanner, DataStatesWriter

FORMS = {
    "dtype": [torch.float32, torch.int32, torch.float32],
    "width": [torch.float32, torch.float64, torch.bfloat16],
}


def _values(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(100)


def _saver(path):
    return DataStatesWriter(path, host_cache_size=CACHE, read_window="immediate", defer="all")


def _saved(state, by, planner):
    future = dcp_datastates.async_save(state, writer=by, planner=planner).upload_completion
    future.result()
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("kind", list(FORMS))
def test_another_dtype(kind, shared_dir):
    """Of the same shape; even of the same size."""
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    for number, dtype in enumerate(FORMS[kind] * 2):
        state = {"w": _values((300, 70), number).to(dtype)}
        _saved(state, by, planner)
        metadata = DataStatesReader(shared_dir / "c").read_metadata()
        assert metadata.state_dict_metadata["w"].properties.dtype == dtype
        found = load({"w": torch.zeros(300, 70, dtype=dtype)}, shared_dir / "c")
        assert torch.equal(found["w"], state["w"])
        dist.barrier()


@ranks(2)
def test_the_same_shards_of_another_whole(shared_dir):
    """Local shapes that are equal, cut from the other dimension."""
    mesh = init_device_mesh("cpu", (2,))
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    for number in range(6):
        dim = number % 2
        whole = _values((600, 300) if dim == 0 else (300, 600), number)
        state = {"w": distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)}
        assert state["w"].to_local().shape == (300, 300)
        _saved(state, by, planner)
        found = load({"w": torch.zeros(whole.shape)}, shared_dir / "c")
        assert torch.equal(found["w"], whole)
        dist.barrier()


@ranks(2)
def test_the_same_values_on_another_mesh(shared_dir):
    """A replica on each rank, and a shard on each: of equal local shapes."""
    mesh = init_device_mesh("cpu", (2,))
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    for number in range(6):
        sharded = number % 2 == 1
        whole = _values((600 if sharded else 300, 300), number)
        placement = Shard(0) if sharded else Replicate()
        state = {"w": distribute_tensor(whole, mesh, [placement], src_data_rank=None)}
        _saved(state, by, planner)
        found = load({"w": torch.zeros(whole.shape)}, shared_dir / "c")
        assert torch.equal(found["w"], whole)
        dist.barrier()


@ranks(2)
def test_another_shape_of_the_same_size(shared_dir):
    planner, by = DataStatesSavePlanner(), _saver(shared_dir / "c")
    for number, shape in enumerate([(300, 70), (70, 300), (21_000,)] * 2):
        state = {"w": _values(shape, number)}
        _saved(state, by, planner)
        found = load({"w": torch.zeros(shape)}, shared_dir / "c")
        assert torch.equal(found["w"], state["w"])
        dist.barrier()
