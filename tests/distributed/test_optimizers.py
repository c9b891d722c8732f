"""Optimizers on two ranks: shards, stages of a pipeline, and what ranks have of their own, beside the live objects."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from support.jobs.groups import gathered
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, assert_same, raises
from support.tiers import sampled
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dcp_datastates import CheckpointManager
from dcp_datastates.errors import IncompatibleStateError

same = functools.partial(assert_same, types=True)


def manager(root):
    return CheckpointManager(root, every=1, save_last=False, max_failures=1, host_cache_size=CACHE)


def saved(root, state):
    with manager(root) as checkpoints:
        checkpoints.save(0, state).result()


def restored(root, state):
    with manager(root) as checkpoints:
        assert checkpoints.restore_latest(state) == 0


class _Rows(torch.optim.Optimizer):
    """Keeps a number for each row, as Adafactor does: shards of another shape than the parameter's."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            rows = parameter.grad.square()
            rows = rows.mean(1) if rows.dim() > 1 else rows
            state = self.state[parameter]
            state["by size"] = {0: rows + state["by size"][0] if state else rows}
            parameter.sub_(parameter.grad, alpha=0.1)


OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "rows": lambda parameters: _Rows(parameters),
}


def blocks_and_root(model):
    fully_shard(model[0])
    return fully_shard(model)


WRAPS = {
    "FSDP2": blocks_and_root,
    "DDP": DistributedDataParallel,
    "FSDP1": lambda model: FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu")
    ),
}


def program(wrap, make):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
    return {"model": model, "optimizer": make(model.parameters())}


def train(state, steps=1):
    for n in range(steps):
        state["model"](torch.full((2, 6), n + 1.0)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def validate(state):
    with torch.no_grad():
        state["model"](torch.ones(2, 6))


@pytest.mark.parametrize(
    ("wrap", "kind"),
    sampled(
        [
            (wrap, kind)
            for wrap in WRAPS
            for kind in OPTIMIZERS
            if (wrap, kind) != ("FSDP1", "rows")
        ],
        keep=[("FSDP2", "rows"), ("DDP", "AdamW"), ("FSDP1", "AdamW"), ("FSDP2", "momentum")],
    ),
)
@ranks(2)
def test_states_come_back_also_between_a_validation_and_a_step(shared_dir, wrap, kind):
    first = program(WRAPS[wrap], OPTIMIZERS[kind])
    train(first, 2)
    validate(first)
    saved(shared_dir, first)
    expected = copy.deepcopy(first["optimizer"].state_dict())
    second = program(WRAPS[wrap], OPTIMIZERS[kind])
    validate(second)
    restored(shared_dir, second)
    same(second["optimizer"].state_dict(), expected)
    train(first, 2), train(second, 2)
    same(second["optimizer"].state_dict(), first["optimizer"].state_dict())


@pytest.mark.parametrize("wrap", ["DDP", "FSDP1"])
@ranks(2)
def test_what_a_restore_leaves_out_stays_as_the_program_made_it(shared_dir, wrap):
    def made(rate):
        def groups(parameters):
            of_none = {"params": [], "lr": rate}
            return torch.optim.AdamW([{"params": parameters}, of_none], lr=rate, amsgrad=True)

        return program(WRAPS[wrap], groups)

    first = made(0.1)
    train(first)
    saved(shared_dir, first)
    for left_out, stepped in (("optimizer", False), ("optimizer.groups", True)):
        second = made(0.2)
        with manager(shared_dir) as checkpoints:
            checkpoints.restore(0, second, exclude=left_out)
        assert bool(second["optimizer"].state) == stepped
        assert second["optimizer"].param_groups[0]["lr"] == 0.2
        train(second)
    third = made(0.2)
    restored(shared_dir, third)
    assert [group["lr"] for group in third["optimizer"].param_groups] == [0.1, 0.2]
    train(first), train(third)
    same(third["optimizer"].state_dict()["state"], first["optimizer"].state_dict()["state"])


def stages(layout):
    """This rank's parts of a model with four layers, one group of the optimizer for each."""
    parts = []
    for numbers in layout[dist.get_rank()]:
        part = nn.Module()
        part.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in numbers})
        parts.append(part)
    groups = [
        {"params": [*part.layers[number].parameters()], "lr": 0.1 + int(number)}
        for part in parts
        for number in part.layers
    ]
    return {"model": parts, "optimizer": torch.optim.AdamW(groups)}


def trained_stages(layout):
    state = stages(layout)
    for group in state["optimizer"].param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.rand_like(parameter)
    state["optimizer"].step()
    return state


def layers_of(state):
    """Values, moments and rate of each layer of this rank."""
    found = {}
    for group in state["optimizer"].param_groups:
        for part in state["model"]:
            for number, layer in part.layers.items():
                if layer.weight is group["params"][0]:
                    moments = state["optimizer"].state[layer.weight]["exp_avg"]
                    found[number] = copy.deepcopy([layer.weight.detach(), moments, group["lr"]])
    return found


@ranks(2)
def test_stages_of_a_pipeline_have_the_models_names_and_their_own_settings(shared_dir):
    first = trained_stages([[[0], [3]], [[1], [2]]])
    saved(shared_dir, first)
    expected = {
        number: layer for each in gathered(layers_of(first)) for number, layer in each.items()
    }
    for layout in (
        [[[0], [3]], [[1], [2]]],
        [[[0, 1]], [[2, 3]]],
        [[[0, 1, 2, 3]], [[0, 1, 2, 3]]],
    ):
        second = stages(layout)
        for group in second["optimizer"].param_groups:
            group["lr"] = 9.0
        restored(shared_dir, second)
        found = layers_of(second)
        same(found, {number: expected[number] for number in found})


@ranks(2)
def test_each_rank_has_its_own_parameters_that_no_model_has(shared_dir):
    def loose(value):
        parameter = nn.Parameter(torch.full((3,), value))
        parameter.grad = torch.full((3,), value)
        return {"optimizer": torch.optim.AdamW([parameter])}

    first, second = loose(1.0 + dist.get_rank()), loose(7.0)
    first["optimizer"].step()
    saved(shared_dir, first)
    restored(shared_dir, second)
    same(second["optimizer"].state_dict(), first["optimizer"].state_dict())
    values = [each["optimizer"].param_groups[0]["params"][0].detach() for each in (second, first)]
    same(*values)


@ranks(2)
def test_moments_that_no_rank_takes_are_refused_on_all(shared_dir):
    saved(shared_dir, trained_stages([[[0]], [[1]]]))
    second = stages([[[0]], [[2]]])
    before = copy.deepcopy(second["model"][0].state_dict())
    with (
        manager(shared_dir) as checkpoints,
        raises(IncompatibleStateError, "state.layers.1.weight"),
    ):
        checkpoints.restore_latest(second, missing="ignore")
    same(second["model"][0].state_dict(), before)


@ranks(2)
@pytest.mark.parametrize("here", [0, 1])
def test_an_optimizer_that_one_rank_has_is_no_loss_on_the_other(here, shared_dir):
    """A generator's on one rank, a discriminator's on the other."""

    def program(optimizer):
        torch.manual_seed(3)
        state = {"model": nn.Linear(4, 4)}
        if optimizer:
            state["extra"] = torch.optim.AdamW(state["model"].parameters())
            state["model"](torch.ones(2, 4)).sum().backward()
        return state

    mine = dist.get_rank() == here
    first = program(mine)
    if mine:
        first["extra"].step()
    saved(shared_dir, first)
    second = program(mine)
    restored(shared_dir, second)
    if mine:
        same(second["extra"].state_dict(), first["extra"].state_dict())
    third = program(False)
    with manager(shared_dir) as checkpoints, raises(IncompatibleStateError, "optimizer 'extra'"):
        checkpoints.restore_latest(third)
