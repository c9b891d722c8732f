"""DTensors around wrapper subclasses: each shard's parts are stored, and other shards are cut from them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.ranks import ranks
from support.state.checkpoints import async_save, load_by_both, raises, save, writer
from support.state.files import data_files, flip_bit
from support.state.wrapped import Blocks, blocks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import dcp_datastates
from dcp_datastates import DataStatesSavePlanner
from dcp_datastates.errors import CheckpointCorruptError, IncompatibleStateError

ROWS, COLUMNS = 16, 3

SHARDED = ((4,), (Shard(0),))
HYBRID = ((2, 2), (Replicate(), Shard(0)))
REPLICATED = ((4,), (Replicate(),))


def _placed(whole: Blocks, placed) -> DTensor:
    """The rows of ``whole`` that this rank holds."""
    mesh = init_device_mesh("cpu", placed[0])
    parts = mesh.size(mesh.ndim - 1) if placed[1][-1] == Shard(0) else 1
    at = mesh.get_local_rank(mesh.ndim - 1) if parts > 1 else 0
    rows = ROWS // parts
    local = whole[at * rows : (at + 1) * rows] if parts > 1 else whole
    local = Blocks(local.codes.clone(), local.scales.clone(), local.label)
    return DTensor.from_local(local, mesh, placed[1], run_check=False)


def _same(found: DTensor, expected: DTensor) -> bool:
    mine, other = found.to_local(), expected.to_local()
    return torch.equal(mine.codes, other.codes) and torch.equal(mine.scales, other.scales)


@ranks(4)
def test_shards_come_back_by_every_way(shared_dir):
    state = {"w": _placed(blocks(ROWS, COLUMNS, seed=1), HYBRID)}
    async_save(state, shared_dir / "dcp").result(60)
    save(state, shared_dir / "planner", planner=DataStatesSavePlanner())
    for name in ("own", "cached"):  # the second by a cached plan
        dcp_datastates.async_save(state, shared_dir / name).result(60)
    for name in ("dcp", "planner", "own", "cached"):
        found = {"w": _placed(blocks(ROWS, COLUMNS), HYBRID)}
        load_by_both(found, shared_dir / name, unexpected="error", share_reads=True)
        assert _same(found["w"], state["w"])


@pytest.mark.parametrize("target", [HYBRID, REPLICATED], ids=["hybrid", "replicated"])
@ranks(4)
def test_other_shards_are_cut_and_put_together(shared_dir, target):
    whole = blocks(ROWS, COLUMNS, seed=1)
    async_save({"w": _placed(whole, SHARDED)}, shared_dir / "shards").result(60)
    async_save({"w": _placed(whole, HYBRID)}, shared_dir / "fewer").result(60)
    expected = _placed(whole, target)
    for name in ("shards", "fewer"):
        found = {"w": _placed(blocks(ROWS, COLUMNS), target)}
        load_by_both(found, shared_dir / name, unexpected="error")
        assert _same(found["w"], expected)
        sharded = {"w": _placed(blocks(ROWS, COLUMNS), SHARDED)}
        load_by_both(sharded, shared_dir / name, unexpected="error")
        assert _same(sharded["w"], _placed(whole, SHARDED))


@ranks(4)
def test_a_whole_wrapper_and_shards_of_one_load_from_each_other(shared_dir):
    whole = blocks(ROWS, COLUMNS, seed=1)
    async_save({"w": whole}, shared_dir / "whole").result(60)
    async_save({"w": _placed(whole, SHARDED)}, shared_dir / "shards").result(60)
    sharded, plain = {"w": _placed(blocks(ROWS, COLUMNS), SHARDED)}, {"w": blocks(ROWS, COLUMNS)}
    load_by_both(sharded, shared_dir / "whole", unexpected="error")
    assert _same(sharded["w"], _placed(whole, SHARDED))
    load_by_both(plain, shared_dir / "shards", unexpected="error")
    assert torch.equal(plain["w"].dense(), whole.dense())


@ranks(3)
def test_shards_that_the_class_cannot_cut_are_refused_by_name(shared_dir):
    rows = 6  # blocks of two: three ranks with one each
    mesh = init_device_mesh("cpu", (3,))
    saved = blocks(2, COLUMNS, seed=1)
    state = {"w": DTensor.from_local(saved, mesh, [Shard(0)], run_check=False)}
    async_save(state, shared_dir).result(60)
    pairs = init_device_mesh("cpu", (3, 1))
    found = DTensor.from_local(
        Blocks(torch.zeros(rows, 1, dtype=torch.int8), torch.zeros(3)),
        pairs,
        [Shard(1), Replicate()],
        run_check=False,
    )
    with raises(IncompatibleStateError, "'w'", "[0:2,", "not between blocks", "that were saved"):
        load_by_both({"w": found}, shared_dir)


@ranks(2)
def test_another_shape_is_refused_by_name(shared_dir):
    mesh = init_device_mesh("cpu", (2,))
    saved, smaller = (
        DTensor.from_local(blocks(rows, COLUMNS, seed=1), mesh, [Shard(0)], run_check=False)
        for rows in (8, 4)
    )
    async_save({"w": saved}, shared_dir / "shards").result(60)
    with raises(IncompatibleStateError, "'w'", "(8, 3)", "(16, 3)"):
        load_by_both({"w": smaller}, shared_dir / "shards")
    async_save({"w": blocks(8, COLUMNS, seed=1)}, shared_dir / "whole").result(60)
    with raises(IncompatibleStateError, "'w'", "(8, 3)"):
        load_by_both({"w": saved}, shared_dir / "whole")


@ranks(2)
def test_a_shard_that_was_not_saved_is_told_of(shared_dir):
    mesh = init_device_mesh("cpu", (2,))
    mine = DTensor.from_local(blocks(8, COLUMNS, seed=1), mesh, [Shard(0)], run_check=False)
    if dist.get_rank() == 1:
        planner = DataStatesSavePlanner()
        dcp.save({"w": mine}, storage_writer=writer(shared_dir), planner=planner, no_dist=True)
    dist.barrier()
    with raises(IncompatibleStateError, "'w'", "24 elements", "not stored"):
        load_by_both({"w": blocks(16, COLUMNS)}, shared_dir)


@ranks(2)
def test_a_rank_outside_the_mesh_saves_and_loads_nothing(shared_dir):
    mesh = DeviceMesh("cpu", [1])

    def state(seed):
        if mesh.get_coordinate() is not None:
            return {"w": DTensor.from_local(blocks(seed=seed), mesh, [Shard(0)], run_check=False)}
        meta = TensorMeta(torch.Size((8, 3)), (3, 1), torch.float32)
        spec = DTensorSpec(mesh, (Shard(0),), meta)
        return {"w": DTensor(blocks(0), spec, requires_grad=False)}

    saved, found = state(1), state(0)
    async_save(saved, shared_dir).result(60)
    load_by_both(found, shared_dir, unexpected="error")
    assert _same(found["w"], saved["w"]) or dist.get_rank() == 0
    if dist.get_rank() == 0:
        everything = dcp_datastates.load(shared_dir)
        assert everything["w"].keys() == {"[0:8,0:3]"}


@ranks(2)
def test_a_corrupt_shard_is_called_corrupt_when_other_shards_are_cut_from_it(shared_dir):
    mesh = init_device_mesh("cpu", (2,))
    mine = DTensor.from_local(blocks(1024, 4096, seed=1), mesh, [Shard(0)], run_check=False)
    async_save({"w": mine}, shared_dir).result(60)
    if dist.get_rank() == 0:
        for file in data_files(shared_dir):
            flip_bit(file, file.stat().st_size // 2)  # of the codes
    dist.barrier()
    with raises(CheckpointCorruptError, "'w.[", "codes'"):
        load_by_both({"w": blocks(2048, 4096)}, shared_dir)


@ranks(2)
def test_a_tensor_that_is_a_wrapper_on_some_ranks_only_is_refused_by_name(shared_dir):
    """As torchao's optimizers make it of a shard that is empty."""
    mesh = init_device_mesh("cpu", (2,))
    whole = blocks(ROWS, COLUMNS)
    local = whole if dist.get_rank() == 0 else torch.empty(0, COLUMNS)
    shape = (torch.Size((ROWS, COLUMNS)), (COLUMNS, 1))
    w = DTensor.from_local(
        local, mesh, (Shard(0),), run_check=False, shape=shape[0], stride=shape[1]
    )
    with raises(Exception, "key:w", "wrapper subclasses on some ranks", "shard this tensor evenly"):
        dcp_datastates.async_save({"w": w}, shared_dir / "a").result(60)


@ranks(2)
def test_a_whole_tensor_that_is_a_wrapper_on_one_rank_only_is_refused_by_name(shared_dir):
    whole = blocks(ROWS, COLUMNS)
    w = whole if dist.get_rank() == 0 else torch.zeros(ROWS, COLUMNS)
    with raises(Exception, "'w'", "a value", "a wrapper subclass"):
        dcp_datastates.async_save({"w": w}, shared_dir / "a").result(60)
