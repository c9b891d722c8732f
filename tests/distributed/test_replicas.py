"""What several ranks write parts of must be equal on them: a difference fails the save, and no mixture is committed."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, assert_same, load_everything, raises
from support.state.planners import own_step
from support.tiers import sampled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesSavePlanner, DataStatesWriter, track
from dcp_datastates.errors import ReplicasDifferError, SnapshotTornError

SHAPE = (3000, 200)
"""Of float32: large enough to be cut."""


class _Model:
    """Weights that an optimizer owns, the same on all ranks, and more that none owns."""

    def __init__(self, count=3):
        torch.manual_seed(3)
        self.weights = {f"w{n}": torch.nn.Parameter(torch.randn(SHAPE)) for n in range(count)}
        self.optimizer = torch.optim.SGD(self.weights.values(), lr=0.0)
        track(self.optimizer)

    def state(self, **more):
        return {**{name: weight.detach() for name, weight in self.weights.items()}, **more}


def _writer(path, **options):
    options = {"reads": "immediate", "host_cache_size": CACHE, **options}
    return DataStatesWriter(path, **options)


def _save(how, state, path, planner, **options):
    if how == "save":
        by = _writer(path, **options)
        dcp.save(state, storage_writer=by, planner=planner, process_group=own_group())
        by.committed.result(60)
    else:
        dcp_datastates.async_save(
            state, writer=_writer(path, **options), planner=planner
        ).upload_completion.result(60)
    dist.barrier()


def _chunks(path, name):
    metadata = DataStatesReader(path).read_metadata()
    dist.barrier()
    return len(metadata.state_dict_metadata[name].chunks)


def _found(path):
    found = load_everything(path)
    dist.barrier()
    return found


@ranks(3)
@pytest.mark.parametrize(
    ("at", "how"),
    sampled(
        itertools.product([0, 2], ["save", "async_save"]), keep=[(0, "save"), (2, "async_save")]
    ),
)
def test_replicas_that_differ_fail_the_save_by_name_and_no_other(at, how, shared_dir):
    model, planner = _Model(), DataStatesSavePlanner()
    for number in range(at):
        _save(how, model.state(number=number), shared_dir / "c", planner)
    if dist.get_rank() == 2:
        model.weights["w1"].data.add_(1)
    with raises(ReplicasDifferError, "rank 0 and rank 2", "'w1'", "split_replicas=False"):
        _save(how, model.state(number=9), shared_dir / "c", planner)
    dist.barrier()
    if at:
        assert _found(shared_dir / "c")["number"] == at - 1
    else:
        assert not (shared_dir / "c" / ".metadata").exists()
    dist.barrier()
    if dist.get_rank() == 2:
        model.weights["w1"].data.sub_(1)
    dist.broadcast(model.weights["w1"].data, 0)
    for number in range(10, 12):
        _save(how, model.state(number=number), shared_dir / "c", planner)
        assert_same(_found(shared_dir / "c"), model.state(number=number))


@ranks(4)
@pytest.mark.parametrize("placements", [[Replicate(), Replicate()], [Replicate(), Shard(0)]])
def test_replicas_of_dtensors_are_compared_too(placements, shared_dir):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    local = torch.full(SHAPE, 1.0)
    state = {"w": DTensor.from_local(local, mesh, placements), "v": torch.ones(3)}
    planner = DataStatesSavePlanner()
    for _ in range(2):
        _save("async_save", state, shared_dir / "c", planner)
    assert _chunks(shared_dir / "c", "w") in (4, 4)
    if dist.get_rank() == 3:
        local.fill_(2.0)
    with raises(ReplicasDifferError, "rank 3", "'w'"):
        _save("async_save", state, shared_dir / "c", planner)


@ranks(2)
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_the_values_count_and_not_how_they_lie_in_memory(how, shared_dir):
    torch.manual_seed(1)
    values = torch.randn(64, 64, 16, 16)
    strided = values.contiguous(memory_format=torch.channels_last)
    weight = torch.nn.Parameter(strided if dist.get_rank() else values)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    track(optimizer)
    planner = DataStatesSavePlanner()
    for _ in range(3):
        _save(how, {"w": weight.detach()}, shared_dir / "c", planner)
        assert_same(_found(shared_dir / "c"), {"w": values})
    assert _chunks(shared_dir / "c", "w") == 2


@ranks(2)
def test_without_splitting_nothing_is_compared(shared_dir):
    model, planner = _Model(), DataStatesSavePlanner(split_replicas=False)
    model.weights["w0"].data.fill_(dist.get_rank())
    for _ in range(2):
        _save("async_save", model.state(), shared_dir / "c", planner)
        assert len(_found(shared_dir / "c")["w0"].unique()) == 1


@ranks(2)
def test_an_optimizer_that_appears_changes_the_plan(shared_dir):
    planner = DataStatesSavePlanner()
    weight = torch.nn.Parameter(torch.ones(SHAPE))
    for _ in range(2):
        _save("async_save", {"w": weight.detach()}, shared_dir / "c", planner)
    assert _chunks(shared_dir / "c", "w") == 1
    optimizer = torch.optim.SGD([weight], lr=0.0)
    track(optimizer)
    _save("async_save", {"w": weight.detach()}, shared_dir / "c", planner)
    assert _chunks(shared_dir / "c", "w") == 2


@ranks(2)
def test_a_steady_save_sends_a_few_bytes_for_it(shared_dir):
    model, planner = _Model(40), DataStatesSavePlanner()
    by = DataStatesWriter(shared_dir / "c", host_cache_size=CACHE, reads="immediate")
    sent = []

    def report(plain, *args):
        told = plain(*args)
        sent.append(told[0]())
        return told

    with own_step("report", report):
        for number in range(3):
            dcp_datastates.async_save(
                model.state(), writer=by, planner=planner
            ).upload_completion.result(60)
            assert by.last_save.steady == (number > 0)
    assert len(sent[2]) < min(200, len(sent[0]))


@ranks(2)
def test_replicas_whose_memory_has_gone_tear_the_save_and_crash_nothing(shared_dir):
    # Large: the allocator unmaps what is freed.
    weight = torch.nn.Parameter(torch.ones(50_000, 200))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    track(optimizer)
    planner, go_on = DataStatesSavePlanner(), threading.Event()
    state = {"w": weight.detach()}
    for _ in range(2):
        _save("async_save", state, shared_dir / "c", planner)

    def held(plain, *args):
        assert go_on.wait(60)
        return plain(*args)

    by = _writer(shared_dir / "c", reads=30)
    with own_step("take", held):
        handle = dcp_datastates.async_save(state, writer=by, planner=planner)
        if dist.get_rank() == 1:
            state["w"].resize_(100_000, 200)  # moves the memory, and tells no one
        go_on.set()
        with raises(SnapshotTornError, "rank 1"):
            handle.upload_completion.result(60)
    dist.barrier()
