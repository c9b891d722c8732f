"""Saved on one mesh, loaded on another: sharded by FSDP2, tensor parallelism and both."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.groups import gathered
from support.jobs.ranks import ranks, run_on_ranks
from support.state.checkpoints import assert_same, attempts, load_by_both, save, zeros
from support.state.meshes import Block, collect, fsdp_tp, full
from support.tiers import sampled
from torch.distributed.checkpoint import HuggingFaceStorageReader

LAYOUTS = {"fsdp 4": (4, (4, 1)), "tp 4": (4, (1, 4)), "2x2": (4, (2, 2)), "fsdp 2": (2, (2, 1))}


def _saves(shape, path, **more):
    model, optimizer = fsdp_tp(Block(), shape)
    state = collect(model, optimizer)
    save({**state, **more}, path / "c")
    reference = {name: full(tensor) for name, tensor in state.items()}
    if dist.get_rank() == 0:
        torch.save(reference, path / "dense.pt")


def _loads(shape, path, by=load_by_both):
    model, optimizer = fsdp_tp(Block(seed=1), shape)
    state = collect(model, optimizer)
    target = zeros(state)
    by(target, path / "c")
    expected = torch.load(path / "dense.pt", weights_only=True)
    assert_same({name: full(tensor) for name, tensor in target.items()}, expected)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    sampled(
        itertools.product(["fsdp 4", "tp 4", "2x2"], LAYOUTS),
        keep=[("fsdp 4", "tp 4"), ("tp 4", "fsdp 2"), ("2x2", "fsdp 2")],
    ),
)
def test_any_mesh_loads_what_another_saved(saved, loaded, shared_dir):
    world, shape = LAYOUTS[saved]
    run_on_ranks(world, _saves, shape=shape, path=shared_dir)
    world, shape = LAYOUTS[loaded]
    run_on_ranks(world, _loads, shape=shape, path=shared_dir)


def test_the_hugging_face_reader_reshards_across_ranks(shared_dir):
    """Files that this package writes are safetensors files, which other readers of DCP's can read."""
    run_on_ranks(4, _saves, shape=(2, 2), path=shared_dir, object={"a": 1})
    for world, shape in ((2, (2, 1)), (4, (1, 4))):
        run_on_ranks(world, _loads, shape=shape, path=shared_dir, by=_load_by_hugging_face)
    run_on_ranks(1, _loads_dense, path=shared_dir)


def _load_by_hugging_face(state, path):
    (attempt,) = attempts(path)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(attempt)))


def _loads_dense(path):
    expected = torch.load(path / "dense.pt", weights_only=True)
    target = zeros(expected)
    _load_by_hugging_face(target, path / "c")
    assert_same(target, expected)


@ranks(4)
def test_the_sharded_state_has_the_awkward_cases_it_is_meant_to_have(shared_dir):
    model, optimizer = fsdp_tp(Block(), (2, 2))
    state = collect(model, optimizer)
    placements = {
        str(tensor.placements) for tensor in state.values() if hasattr(tensor, "placements")
    }
    assert any("_StridedShard" in placement for placement in placements), placements
    sizes = [
        tuple(tensor.to_local().shape) for tensor in state.values() if hasattr(tensor, "to_local")
    ]
    of_all = gathered(sizes)
    assert any(0 in size for rank in of_all for size in rank), "no rank has a zero-size shard"
    assert len({tuple(rank) for rank in map(tuple, of_all)}) > 1, "all shards are of one size"
