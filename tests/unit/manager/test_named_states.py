"""The names of a model's and an optimizer's values, which are remembered: always those that torch would give."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
import torch.distributed.checkpoint.state_dict as torchs
from support.tiers import sampled
from torch import nn
from torch.optim import SGD, AdamW

from dcp_datastates.manager import named_states
from dcp_datastates.manager.named_states import model_state, optimizer_state


class _Counts(nn.Module):
    """A module with an extra state, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.inner(x) + self.mean

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class _Prefixed(nn.Module):
    """Like a wrapper for DDP: all lies below ``module.``, which torch leaves out for DDP alone."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def _model(rng):
    layers = [rng.choice([nn.Linear(3, 3), _Counts(), nn.LayerNorm(3)]) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(3, 3))
    kind = rng.choice(["plain", "tied", "compiled", "prefixed", "partly"])
    if kind == "tied":
        model[-1].weight = nn.Parameter(torch.eye(3))
        model.append(nn.Linear(3, 3))
        model[-1].weight = model[-2].weight
    if kind == "compiled":
        return torch.compile(model, backend="eager")
    if kind == "prefixed":
        return _Prefixed(model)
    if kind == "partly":
        model[0] = torch.compile(model[0], backend="eager")
    return model


def _optimizer(model, rng):
    parameters = [each for each in model.parameters() if each.requires_grad]
    cut = rng.randrange(1, len(parameters))
    kind = rng.choice([AdamW, lambda groups: SGD(groups, lr=0.1, momentum=0.9)])
    return kind([{"params": parameters[:cut], "lr": 0.1}, {"params": parameters[cut:], "lr": 0.2}])


def _inner(model):
    return getattr(model, "_orig_mod", getattr(model, "module", model))


def _change(model, optimizer, rng):
    """What a program may do between two saves; returns the optimizer to go on with."""
    inner = _inner(model)
    match rng.randrange(10):
        case 0:
            inner.append(nn.Linear(3, 3))
        case 1:
            inner[-1].register_buffer(f"extra{rng.randrange(100)}", torch.ones(2))
        case 2:  # the optimizer does not know the new one
            inner[-1].weight = nn.Parameter(torch.ones(3, 3))
        case 3:
            inner.add_module(f"named{rng.randrange(100)}", nn.Linear(3, 3))
            optimizer.add_param_group({"params": list(inner[-1].parameters())})
        case 4:
            next(model.parameters()).requires_grad_(False)
        case 5:
            return _optimizer(model, rng)
        case 6:
            optimizer.state.pop(next(iter(optimizer.state), None), None)
        case 7:  # the same names, other places
            inner[0], inner[-1] = inner[-1], inner[0]
        case 8:
            optimizer.param_groups[0]["lr"] *= 0.5
        case 9:  # the same place, another name
            last = inner[-1]
            del inner[-1]
            inner.add_module(f"renamed{rng.randrange(100)}", last)
    return optimizer


def _step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def _result(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return type(error)


def _same(ours, torchs_):
    if isinstance(torchs_, dict):
        assert ours.keys() == torchs_.keys()
        for key in torchs_:
            _same(ours[key], torchs_[key])
    elif isinstance(torchs_, list):
        assert len(ours) == len(torchs_)
        for mine, other in zip(ours, torchs_, strict=True):
            _same(mine, other)
    elif isinstance(torchs_, torch.Tensor):
        assert ours.data_ptr() == torchs_.data_ptr()
        assert ours.shape == torchs_.shape
        assert ours.requires_grad == torchs_.requires_grad
    else:
        assert ours == torchs_


@pytest.mark.parametrize("seed", sampled(range(200), keep=range(12)))
def test_whatever_a_program_changes_the_names_are_those_of_torch(seed):
    rng = random.Random(seed)
    model = _model(rng)
    optimizer = _optimizer(model, rng)
    for _ in range(12):
        _step(model, optimizer)
        _same(_result(model_state, model), _result(torchs.get_model_state_dict, model))
        expected = _result(torchs.get_optimizer_state_dict, model, optimizer)
        if expected is not AssertionError:  # torch refuses the buffers' names
            _same(_result(optimizer_state, model, optimizer), expected)
        if rng.random() < 0.5:
            optimizer = _change(model, optimizer, rng)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model)])
def test_from_the_second_call_on_torch_is_not_asked(wrap, monkeypatch):
    model = wrap(nn.Sequential(nn.Linear(3, 3), _Counts()))
    optimizer = AdamW(model.parameters())
    for _ in range(2):
        _step(model, optimizer)
        model_state(model)
        optimizer_state(model, optimizer)
        for name in ("get_model_state_dict", "get_optimizer_state_dict"):
            monkeypatch.setattr(named_states, name, None)


def test_no_model_is_kept_alive():
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = AdamW(model.parameters())
    _step(model, optimizer)
    model_state(model)
    optimizer_state(model, optimizer)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None]
