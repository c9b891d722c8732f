"""DataStatesSavePlanner among ranks: shares, what travels, what is remembered, and what is loaded from it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.crashes.failing import armed_on, silence
from support.crashes.residue import Residue, assert_nothing_left
from support.jobs.groups import gathered, own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import (
    CACHE,
    assert_same,
    bits,
    clone,
    load,
    load_everything,
    raises,
    zeros,
)
from support.state.planners import SMALL, own_step, owned, save_by, saver, spied, spy, state_of
from support.state.states import filled
from support.tiers import sampled
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesSavePlanner, DataStatesWriter
from dcp_datastates.errors import ConfigurationError, DataStatesError


def _everything(path):
    """All that is committed there, on one rank alone."""
    found = load_everything(path)
    dist.barrier()
    return found


@ranks(4)
@spied
def test_a_save_like_the_one_before_sends_bytes_and_not_plans(shared_dir):
    planner = spy(DataStatesSavePlanner())
    by = saver(shared_dir / "c")
    for number in range(4):
        steady = save_by(state_of(number, count=200), by, planner)
        assert steady == (number > 0)
    assert planner.offered[0] > 5000
    assert max(planner.offered[1:]) < SMALL
    assert max(planner.answered[1:]) < SMALL
    loaded = zeros(state_of(3, count=200))
    assert_same(load(loaded, shared_dir / "c"), state_of(3, count=200))


@ranks(4)
@spied
def test_a_change_on_one_rank_sends_that_ranks_plan_alone(shared_dir):
    planner, by = spy(DataStatesSavePlanner()), saver(shared_dir / "c")
    for number in range(2):
        save_by(state_of(number, count=100), by, planner)
    mine = dist.get_rank() == 2
    changed = state_of(2, count=101 if mine else 100)
    save_by(changed, by, planner)
    assert (planner.offered[-1] > SMALL) == mine
    assert save_by(state_of(3, count=101 if mine else 100), by, planner)
    state = state_of(3, count=101 if mine else 100)
    assert_same(load(zeros(state), shared_dir / "c"), state)
    # Back again: nothing is forgotten.
    assert save_by(state_of(4, count=100), by, planner)
    assert planner.offered[-1] < SMALL
    assert_same(load(zeros(state_of(4, count=100)), shared_dir / "c"), state_of(4, count=100))


@ranks(4)
@pytest.mark.parametrize("kind", ["plain", "replicated", "replicas of shards"])
def test_what_several_ranks_hold_is_written_in_equal_parts_and_loads_at_any_sharding(
    kind, shared_dir
):
    dense = {f"w{i}": filled((1000 + i, 700), torch.float32, i) for i in range(5)}
    dense["odd"] = filled((333_333, 3), torch.bfloat16, 9)
    dense["bias"] = filled((77,), torch.float32, 10)
    flat = init_device_mesh("cpu", (4,))
    if kind == "plain":
        state, _optimizer = owned(dense)
    elif kind == "replicated":
        state = {
            name: DTensor.from_local(each, flat, [Replicate()]) for name, each in dense.items()
        }
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        placements = [Replicate(), Shard(0)]
        state = {name: distribute_tensor(each, mesh, placements) for name, each in dense.items()}
    planner, by = DataStatesSavePlanner(), saver(shared_dir / "c")
    for number in range(3):
        assert save_by(state, by, planner) == (number > 0)
    sizes = gathered(by.last_save.written_bytes)
    assert max(sizes) / min(sizes) < 1.03, sizes  # headers and checksums among them
    assert_same(load(zeros(state), shared_dir / "c"), state)
    loaded = _everything(shared_dir / "c")
    other = {
        name: distribute_tensor(torch.zeros_like(each), flat, [Shard(each.ndim - 1)])
        for name, each in dense.items()
    }
    load(other, shared_dir / "c")
    for name, tensor in dense.items():
        assert bits(loaded[name]) == bits(tensor), name
        assert bits(other[name].full_tensor()) == bits(tensor), name


@ranks(4)
@pytest.mark.parametrize("split", [True, False])
def test_with_stock_writers_and_readers_it_is_a_planner_like_any_other(split, shared_dir):
    group = own_group()
    replicated, _optimizer = owned({"replicated": filled((2000, 300), torch.float32, 3)})
    state = {**state_of(5), **replicated}
    planner = DataStatesSavePlanner(split_replicas=split)
    for _ in range(2):
        dcp.save(
            state,
            storage_writer=FileSystemWriter(shared_dir / "c"),
            planner=planner,
            process_group=group,
        )
    loaded = zeros(state)
    dcp.load(loaded, storage_reader=FileSystemReader(shared_dir / "c"), process_group=group)
    assert_same(loaded, state)


@ranks(2)
@spied
def test_a_synchronous_save_exchanges_digests_too(shared_dir):
    group, planner = own_group(), spy(DataStatesSavePlanner())
    for number in range(3):
        metadata = dcp.save(
            state_of(number, count=50),
            storage_writer=saver(shared_dir / "c"),
            planner=planner,
            process_group=group,
        )
        assert len(pickle.dumps(metadata)) < SMALL
        assert f"model.r{dist.get_rank()}.w0" in metadata.state_dict_metadata
    assert max(planner.offered[1:]) < SMALL
    assert_same(load(zeros(state_of(2, count=50)), shared_dir / "c"), state_of(2, count=50))


@ranks(2)
@pytest.mark.parametrize(
    ("where", "victim"),
    sampled(
        [*itertools.product(["propose", "take"], [0, 1]), ("assign", 0)],
        keep=[("propose", 0), ("assign", 0), ("take", 1)],
    ),
)
@spied
def test_after_a_failed_save_the_next_is_planned_anew_and_whole(where, victim, shared_dir):
    planner, by = spy(DataStatesSavePlanner()), saver(shared_dir / "c")
    save_by(state_of(0), by, planner)
    before = Residue.now()

    def fail(plain, *args):
        if dist.get_rank() == victim:
            raise RuntimeError(f"refused in {where}")
        return plain(*args)

    with silence(20), own_step(where, fail), pytest.raises(DataStatesError, match="refused"):
        save_by(state_of(1), by, planner)
    assert_nothing_left(before)
    dist.barrier()
    for number in (2, 3):
        save_by(state_of(number), by, planner)
        assert_same(load(zeros(state_of(number)), shared_dir / "c"), state_of(number))
    assert by.last_save.steady


@ranks(2)
def test_another_planner_object_on_one_rank_is_found_out_and_forgiven(shared_dir):
    by = saver(shared_dir / "c")
    planner = DataStatesSavePlanner()
    save_by(state_of(0), by, planner)
    if dist.get_rank() == 0:
        planner = DataStatesSavePlanner()
    with pytest.raises(DataStatesError, match="different planner objects"):
        save_by(state_of(1), by, planner)
    dist.barrier()
    for number in (2, 3):
        save_by(state_of(number), by, planner)
    assert by.last_save.steady
    assert_same(load(zeros(state_of(3)), shared_dir / "c"), state_of(3))


@ranks(2)
def test_what_the_coordinator_was_told_in_saves_that_failed_is_told_again(shared_dir):
    planner, by = DataStatesSavePlanner(), saver(shared_dir / "c")

    def state(length):
        return {
            f"r{dist.get_rank()}": torch.ones(10),
            **({"log": "x" * length} if dist.get_rank() else {}),
        }

    save_by(state(10), by, planner)
    for number in range(6):
        log = shared_dir / f"fired{number}"
        with armed_on(0, "vote.before=error:EIO", log), pytest.raises(DataStatesError):
            save_by(state(1000 * (number + 1)), by, planner)
    for length in (10, 10, 6000):
        save_by(state(length), by, planner)
        assert_same(load(zeros(state(length)), shared_dir / "c"), state(length))


@ranks(2)
def test_the_planner_of_async_save_is_kept(shared_dir):
    by = saver(shared_dir / "c")
    for number in range(3):
        assert save_by(state_of(number), by, None) == (number > 0)
    with contextlib.closing(saver(shared_dir / "d")) as other:
        assert save_by(state_of(5), other, None), "whatever writer"


@ranks(2)
def test_a_save_by_one_rank_alone_leaves_what_the_ranks_agreed_on_as_it_was(shared_dir):
    planner, by = DataStatesSavePlanner(), saver(shared_dir / "c")
    alone = saver(shared_dir / f"alone{dist.get_rank()}")
    save_by(state_of(0), by, planner)
    for number in (1, 2, 3):
        other = state_of(number, count=3)
        dcp.async_save(other, storage_writer=alone, planner=planner, no_dist=True).result(60)
        assert_same(load_alone(other, shared_dir / f"alone{dist.get_rank()}"), other)
        dist.barrier()
        save_by(state_of(number), by, planner)
        save_by(state_of(number, count=3), by, planner)
    assert_same(load(zeros(state_of(3, count=3)), shared_dir / "c"), state_of(3, count=3))


@ranks(2)
def test_a_save_that_could_not_be_read_again_leaves_the_one_before(shared_dir):
    mesh = init_device_mesh("cpu", (2,))
    size = 400_000_000
    mine = torch.empty(1 - dist.get_rank(), size, dtype=torch.uint8)
    whole = DTensor.from_local(mine, mesh, [Shard(0)], shape=(1, size), stride=(size, 1))
    if dist.get_rank() == 0:
        return  # the other one saves alone, and has no byte of the tensor
    planner, by = DataStatesSavePlanner(), saver(shared_dir / "c")
    dcp.save({"n": 1}, storage_writer=by, planner=planner, no_dist=True)
    for _ in range(2):
        with raises(ConfigurationError, "'w' has 400000000", "must save together"):
            dcp.save({"w": whole, "n": 2}, storage_writer=by, planner=planner, no_dist=True)
        assert load_alone({"n": 1}, shared_dir / "c") == {"n": 1}


def load_alone(state, path):
    """What is at ``path``, which this rank has saved alone."""
    loaded = zeros(state)
    dcp.load(loaded, storage_reader=DataStatesReader(path), no_dist=True)
    return loaded


@ranks(1)
def test_metadata_that_were_read_and_changed_stay_so_in_copies(shared_dir):
    by = DataStatesWriter(shared_dir / "c", host_cache_size=CACHE)
    found = dcp.save({"w": torch.ones(4)}, storage_writer=by, planner=DataStatesSavePlanner())
    assert found.version
    found.planner_data = {"changed": ("changed",)}
    for other in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert other.planner_data == found.planner_data
        assert other.state_dict_metadata == found.state_dict_metadata


# --- a plan that changes -----------------------------------------------------------------------------


@ranks(2)
def test_a_share_that_changes_with_another_ranks_state_is_what_is_written(shared_dir):
    planner, by = DataStatesSavePlanner(), saver(shared_dir / "c")
    mine = {f"r{dist.get_rank()}": filled((300, 300), torch.float32, 1)}
    common, _optimizer = owned({"common": filled((4000, 300), torch.float32, 2)})
    first = {**mine, **common} if dist.get_rank() == 0 else mine
    for _ in range(3):
        save_by(first, by, planner)
    assert by.last_save.steady
    # Now rank 1 holds it as well: nothing changes for rank 0 but what it is to write of it.
    both = {**mine, **common}
    steady = save_by(both, by, planner)
    assert not steady or dist.get_rank() == 0
    assert_same(load(zeros(both), shared_dir / "c"), both)
    assert save_by(both, by, planner)
    sizes = gathered(by.last_save.written_bytes)
    assert max(sizes) / min(sizes) < 1.02
    assert_same(load(zeros(both), shared_dir / "c"), both)


@ranks(2)
def test_fsdp_that_reshards_in_place_is_steady_and_each_save_is_the_state_at_its_call(shared_dir):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(*(torch.nn.Linear(301, 301) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    planner = DataStatesSavePlanner()
    by = DataStatesWriter(shared_dir / "c", host_cache_size=CACHE)

    def step():
        model(torch.randn(8, 301)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state():
        return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}

    step()
    steady = []
    for _ in range(5):
        current = state()
        expected = clone(current)
        response = dcp_datastates.async_save(current, writer=by, planner=planner)
        step()
        response.upload_completion.result(60)
        steady.append(by.last_save.steady)
        assert_same(load(zeros(expected), shared_dir / "c"), expected)
        dist.barrier()
    assert steady == [False, True, True, True, True]
