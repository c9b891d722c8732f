"""``reuse="unchanged"`` on several ranks: each links and writes by itself, and all load the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.ranks import ranks, run_on_ranks
from support.state.checkpoints import CACHE, assert_same, bits, load_everything
from support.state.reuse_programs import run_program
from support.state.reusing import fresh, linked, save_reusing, written
from support.tiers import sampled, tries
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_datastates as ds

ROWS = 30_000


def _mesh():
    return DeviceMesh("cpu", list(range(dist.get_world_size())))


def _dense(value, rows=ROWS):
    return torch.arange(rows, dtype=torch.float32) + value


@pytest.mark.parametrize("planner", sampled(["ours", "stock"], keep=["ours", "stock"]))
@ranks(3)
def test_ranks_link_what_has_not_changed_for_them(shared_dir, planner):
    """One rank's tensor changes, and a third of a sharded one; replicas are written by all, in parts."""
    root, rank = Path(shared_dir), dist.get_rank()
    made = dcp.DefaultSavePlanner if planner == "stock" else ds.DataStatesSavePlanner
    sharded, replicated = _dense(1.0), _dense(2.0)
    own = {other: _dense(10.0 + other) for other in range(3)}
    for number in range(4):
        if number:
            own[1] = own[1] + 1
            sharded[-1] += 1
        state = {
            "sharded": distribute_tensor(sharded, _mesh(), [Shard(0)]),
            "replicated": distribute_tensor(replicated, _mesh(), [Replicate()]),
            f"own{rank}": own[rank],
        }
        stats = save_reusing(state, root / str(number), planner=made())
        shard = sharded.nbytes // 3
        changed = own[1].nbytes * (rank == 1) + shard * (rank == 2)
        if number and not (planner == "stock" and rank == 0):
            assert stats.bytes_written <= changed + 10_000
        assert bool(stats.bytes_linked) == bool(number)
        expected = {"sharded": sharded, "replicated": replicated}
        expected |= {f"own{other}": tensor for other, tensor in own.items()}
        if rank == 0:
            assert_same(load_everything(root / str(number)), expected)
            assert ds.verify(root / str(number)).whole
        dist.barrier()
    assert any(file.name.startswith(f"r{rank:05}-") for file in linked(root / "3"))


@ranks(2)
def test_linked_shards_load_on_another_mesh(shared_dir):
    root = Path(shared_dir)
    dense = {"frozen": _dense(1.0), "trained": _dense(2.0, 4_001)}
    for number in range(3):
        dense["trained"] = dense["trained"] + 1
        state = {name: distribute_tensor(t, _mesh(), [Shard(0)]) for name, t in dense.items()}
        save_reusing(state, root / str(number))
    assert linked(root / "2")
    target = {name: distribute_tensor(t * 0, _mesh(), [Replicate()]) for name, t in dense.items()}
    ds.load(root / "2", target)
    for name, tensor in target.items():
        assert isinstance(tensor, DTensor)
        assert bits(tensor) == bits(dense[name])


@ranks(2)
def test_a_rank_that_cannot_link_writes_and_the_other_links(shared_dir):
    from support.crashes.failing import armed_on

    root = Path(shared_dir)
    state = {f"w{dist.get_rank()}": fresh()}
    save_reusing(state, root / "1")
    with armed_on(1, "reuse.link.before=error:EXDEV", root / "fired"):
        stats = save_reusing(state, root / "2")
    assert bool(stats.bytes_linked) == (dist.get_rank() == 0)
    assert ds.verify(root / "2").whole
    dist.barrier()
    names = [file.name[:8] for file in (*linked(root / "2"), *written(root / "2"))]
    assert sorted(names) == ["r00000-0", "r00001-0"]


@ranks(2)
def test_ranks_may_differ_in_the_option(shared_dir):
    root = Path(shared_dir)
    state = {f"w{dist.get_rank()}": fresh()}
    reuse = "unchanged" if dist.get_rank() else "none"
    for number in range(3):
        stats = ds.save(state, root / str(number), host_cache_size=CACHE, reuse=reuse)
        assert bool(stats.bytes_linked) == bool(number and dist.get_rank())
        assert ds.verify(root / str(number)).whole


def program(shared_dir, seed):
    run_program(Path(shared_dir), seed, 25, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("programs", tries(1, 15))
def test_every_committed_checkpoint_is_what_was_saved(shared_dir, programs):
    for seed in range(programs):
        root = shared_dir / str(seed)
        root.mkdir()
        run_on_ranks(2 + seed % 2, program, shared_dir=root, seed=1000 + seed)
