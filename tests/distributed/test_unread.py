"""On several ranks, what counts is what no rank asks for, and one rank says it."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.groups import gathered
from support.jobs.ranks import ranks
from support.state.checkpoints import load, raises, save, zeros
from support.state.meshes import Block, collect, fsdp_tp
from support.waiting import lines

import dcp_datastates
from dcp_datastates import DataStatesReader
from dcp_datastates.errors import IncompatibleStateError


def _of_all_ranks(said):
    """What each rank has said of unread values: on a busy machine there are lines about waits, too."""
    return gathered([line for line in said if "stay unread" in line])


def _saved(path):
    """A sharded state, in which some ranks' shards of some tensors are empty."""
    state = collect(*fsdp_tp(Block(), (4, 1)))
    save(state, path)
    return state


@ranks(4)
def test_shards_that_are_empty_here_are_no_news(shared_dir):
    state = _saved(shared_dir / "c")
    with lines(logging.WARNING) as said:
        load(zeros(state), shared_dir / "c", unexpected="error")
        dcp.load(
            zeros(state),
            storage_reader=DataStatesReader(shared_dir / "c", unexpected="error"),
            no_dist=True,
        )
        assert _of_all_ranks(said) == [[], [], [], []]


@ranks(4)
@pytest.mark.parametrize("no_dist", [False, True])
def test_one_rank_says_what_no_rank_asks_for(no_dist, shared_dir):
    state = _saved(shared_dir / "c")
    target = {
        name: tensor for name, tensor in zeros(state).items() if not name.startswith("layers.1")
    }
    assert len(target) < len(state)
    with lines(logging.WARNING) as said:
        dcp.load(target, storage_reader=DataStatesReader(shared_dir / "c"), no_dist=no_dist)
        first, *others = _of_all_ranks(said)
    assert others == [[], [], []]
    (line,) = first
    assert f"{len(state) - len(target)} of the {len(state)}" in line
    assert "'layers.1" in line


@ranks(4)
def test_ranks_that_ask_for_different_names_leave_nothing(shared_dir):
    path = shared_dir / "c"
    rank = dist.get_rank()
    save({f"of {rank}": torch.full((50,), float(rank))}, path)
    with lines(logging.WARNING) as said:
        load({f"of {rank}": torch.zeros(50)}, path, unexpected="error")
        assert _of_all_ranks(said) == [[], [], [], []]
        if rank < 3:
            load({f"of {rank}": torch.zeros(50)}, path)
        else:
            load({}, path)
        first, *others = _of_all_ranks(said)
    assert others == [[], [], []]
    assert ["1 of the 4" in line and "'of 3'" in line for line in first] == [True]


@ranks(4)
@pytest.mark.parametrize("no_dist", [False, True])
def test_strict_fails_on_every_rank_before_anything_is_read(no_dist, shared_dir):
    state = _saved(shared_dir / "c")
    name = next(iter(state))
    target = {name: zeros(state)[name]}
    with raises(IncompatibleStateError, "stay unread"):
        dcp.load(
            target,
            storage_reader=DataStatesReader(shared_dir / "c", unexpected="error"),
            no_dist=no_dist,
        )
    assert not target[name].to_local().any()


@ranks(4)
def test_the_coordinator_of_the_group_says_it(shared_dir):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    path = shared_dir / f"c{dist.get_rank() // 2}"
    dcp.save(
        {"a": torch.ones(3), "b": torch.ones(3)},
        storage_writer=dcp_datastates.DataStatesWriter(
            path, process_group=mine, host_cache_size="64MiB"
        ),
        process_group=mine,
    )
    with lines(logging.WARNING) as said:
        dcp_datastates.load(path, {"a": torch.zeros(3)}, process_group=mine)
        found = _of_all_ranks(said)
    assert [len(each) for each in found] == [1, 0, 1, 0]
