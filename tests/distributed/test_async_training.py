"""Saving every iteration on several ranks while training goes on: each checkpoint is that of its call."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import assert_same, async_save, clone, load_everything, writer
from support.state.meshes import Block, collect, fsdp_tp, full, train
from support.tiers import sampled, tries
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.nn.parallel import DistributedDataParallel


def _full(state):
    return {name: full(tensor) for name, tensor in state.items()}


@ranks(4)
@pytest.mark.parametrize("saves", tries(4, 8))
@pytest.mark.parametrize(
    ("shape", "read_window", "caching"),
    sampled(
        itertools.product([(4, 1), (2, 2)], ["backward", "immediate"], [False, True]),
        keep=[((2, 2), "backward", False), ((2, 2), "immediate", True)],
    ),
)
def test_every_iteration_is_saved_as_it_was(shape, read_window, caching, saves, shared_dir):
    model, optimizer = fsdp_tp(Block(hidden=512), shape)
    train(model, optimizer)
    group = own_group()
    ours = writer(read_window=read_window, read_deadline=30)
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


@ranks(4)
def test_data_parallel_replicas_and_plain_tensors_are_saved_once(shared_dir):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(300, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 300)).sum().backward()
    optimizer.step()
    state = {"model": model.module.state_dict(), "steps": 3, "plain": torch.arange(50_000)}
    expected = clone(state)
    future = async_save(state, shared_dir / "c", group=own_group())
    model(torch.randn(3, 300)).sum().backward()
    optimizer.step()
    future.result(60)
    assert_same(load_everything(shared_dir / "c"), expected)
    size = sum(file.stat().st_size for file in (shared_dir / "c").rglob("*.safetensors"))
    dense = 300 * 301 * 4 + 50_000 * 8
    assert size < dense + 200_000, "replicas were stored more than once"
