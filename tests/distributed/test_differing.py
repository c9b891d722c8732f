"""What ranks hold under one name, and nothing declares equal: the first rank's is stored, and a difference is named."""

from __future__ import annotations

import logging
from collections import deque
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, assert_same, raises, writer
from support.state.loops import Stateful
from support.tiers import sampled
from support.waiting import lines
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import dcp_datastates as ds
from dcp_datastates import CheckpointManager, DataStatesSavePlanner
from dcp_datastates.errors import UnsupportedStateError
from dcp_datastates.planning import samples

KINDS = {
    "integer": lambda rank: rank,
    "float": lambda rank: 0.5 + rank,
    "text": lambda rank: f"run {rank}",
    "list": lambda rank: [1, [rank]],
    "tuple": lambda rank: (rank, "a"),
    "array": lambda rank: torch.arange(3).numpy() + rank,
    "scalar array": lambda rank: torch.tensor(rank).numpy(),
    "deque": lambda rank: deque([1, rank]),
    "set": lambda rank: {rank, "a"},
    "object": lambda rank: Fraction(rank, 7),
    "in a dict": lambda rank: {"deep": {"x": rank}},
    "small tensor": lambda rank: torch.full((3,), float(rank)),
    "byte": lambda rank: torch.tensor([rank], dtype=torch.uint8),
    "large tensor": lambda rank: torch.full((400_000,), float(rank)),
}
NOTHING = {"none": None, "empty list": [], "empty text": "", "empty tuple": ()}


def by_async_save(state, path):
    ds.async_save(state, path, host_cache_size=CACHE).result(60)


def by_dcp(state, path):
    dcp.save(state, storage_writer=writer(path), planner=DataStatesSavePlanner())


def by_manager(state, path):
    with CheckpointManager(path.parent, every=1, save_last=False, host_cache_size=CACHE) as manager:
        manager.save(int(path.name[-1]), state).result(60)


SAVES = {"async_save": by_async_save, "dcp": by_dcp, "manager": by_manager}


def said_of(state, save, path):
    """The values that differ, as the first rank's log names them."""
    samples.say.cache_clear()
    with lines(logging.WARNING) as said:
        save(state, path)
    dist.barrier()
    found = [line for line in said if "hold different values" in line]
    assert dist.get_rank() == 0 or not found, "one rank says it"
    return "".join(found)


@pytest.mark.parametrize("save", sampled(SAVES, keep=["async_save", "dcp"]))
@ranks(3)
def test_the_first_rank_s_value_is_stored_and_others_are_named(shared_dir, save):
    rank = dist.get_rank()
    for number in range(2):  # the second plan is cached
        state = {kind: make(rank) for kind, make in KINDS.items()}
        said = said_of({**state, "same": 7}, SAVES[save], shared_dir / f"step-{number}")
        if rank == 0:
            assert [kind for kind in KINDS if f"'{kind}" not in said] == [], said
            assert "'same'" not in said
            assert "PerRank" in said
        found = ds.load(shared_dir / f"step-{number}", exclude="same", allow_objects=True)
        assert found.pop("array").tolist() == [0, 1, 2]
        assert_same(found, {kind: make(0) for kind, make in KINDS.items() if kind != "array"})


@ranks(2)
def test_what_only_the_first_rank_has_is_stored_without_a_word(shared_dir):
    rank = dist.get_rank()
    state = {name: nothing if rank else 0.31 for name, nothing in NOTHING.items()}
    assert said_of(state, by_async_save, shared_dir / "a") == ""
    assert ds.load(shared_dir / "a") == dict.fromkeys(NOTHING, 0.31)
    state = {name: 0.31 if rank else nothing for name, nothing in NOTHING.items()}
    said = said_of(state, by_async_save, shared_dir / "b")
    assert ds.load(shared_dir / "b") == NOTHING, "the first rank's is stored"
    assert rank or all(f"'{name}'" in said for name in NOTHING), "and a value was lost"


@ranks(2)
def test_a_shard_within_an_object_is_refused_and_in_a_list_it_is_each_rank_s(shared_dir):
    mesh = init_device_mesh("cpu", (2,))
    shard = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    computed = shard.detach().requires_grad_() * 1  # cannot be deep-copied
    for value in ((shard, 1), {"a": deque([shard])}, (computed, 1)):
        with raises(UnsupportedStateError, "'v", "DTensor; use a dict or a list"):
            ds.save({"v": value}, shared_dir / "a")
    ds.save({"v": (shard.redistribute(mesh, [Replicate()]), 1)}, shared_dir / "a")
    states = {"one": shard, "list": [shard, 3]}
    by_manager({name: Stateful(each) for name, each in states.items()}, shared_dir / "step-1")
    found = {"one": Stateful(shard * 0), "list": Stateful([shard * 0, 0])}
    with CheckpointManager(shared_dir, every=1, save_last=False) as manager:
        manager.restore(1, found)
    (second, number), first = found["list"].state, found["one"].state
    assert number == 3
    assert torch.equal(first.to_local(), shard.to_local())
    assert torch.equal(second.to_local(), shard.to_local())


CLASHES = {
    "a number and its text": ({1: 0.5}, {1: 0.5, "1": 0.5}),
    "a dot in a key": ({"a": {"b": 1}}, {"a": {"b": 1}, "a.b": 2}),
    "an empty dict": ({"a": {}}, {"a": {"b": {}}, "a.b": 2}),
    "a value and a dict": ({"a": 1}, {"a": {"b": 1}}),
    "a tensor and a list": ({"a": torch.ones(3)}, {"a": [torch.ones(3)]}),
}


@pytest.mark.parametrize("save", sampled(SAVES, keep=["async_save", "manager"]))
@ranks(2)
def test_one_rank_s_clashing_names_fail_the_save_on_all_and_the_next_one_works(shared_dir, save):
    rank = dist.get_rank()
    for number, (fine, clash) in enumerate(CLASHES.values()):
        for at in (0, 1):
            with raises(ds.errors.DataStatesError, "'h."):
                SAVES[save]({"h": clash if rank == at else fine}, shared_dir / f"{number}{at}-0")
            dist.barrier()
    SAVES[save]({"h": fine}, shared_dir / "fine-0")
    assert_same(ds.load(shared_dir / ("step-0" if save == "manager" else "fine-0")), {"h": fine})
