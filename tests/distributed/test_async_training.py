"""Saving every iteration on several ranks while training goes on: each checkpoint is that of its call."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import assert_same, async_save, load_everything, writer
from support.state.meshes import Block, collect, fsdp_tp, full, train
from support.tiers import sampled, tries
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner


def _full(state):
    return {name: full(tensor) for name, tensor in state.items()}


@ranks(4)
@pytest.mark.parametrize("saves", tries(4, 8))
@pytest.mark.parametrize(
    ("shape", "reads", "caching"),
    sampled(
        itertools.product([(4, 1), (2, 2)], [30, "immediate"], [False, True]),
        keep=[((2, 2), 30, False), ((2, 2), "immediate", True)],
    ),
)
def test_every_iteration_is_saved_as_it_was(shape, reads, caching, saves, shared_dir):
    model, optimizer = fsdp_tp(Block(hidden=512), shape)
    train(model, optimizer)
    group = own_group()
    ours = writer(reads=reads)
    planner = DefaultSavePlanner(enable_plan_caching=caching)
    saved = []
    for number in range(saves):
        expected = _full(collect(model, optimizer))
        state = {**collect(model, optimizer), "iteration": number}
        path = shared_dir / str(number)
        future = async_save(state, None, by=ours, group=group, checkpoint_id=path, planner=planner)
        train(model, optimizer)
        future.result(60)
        saved.append((path, expected))
    dist.barrier()
    for number, (path, expected) in enumerate(saved):
        if dist.get_rank() == number % 4:
            assert_same(load_everything(path), {**expected, "iteration": number})
