"""A save of what is not trained is warned of, by name; a save of what is trained never is."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support.state.loops import manager
from support.waiting import lines

from dcp_datastates import Trainable


def _warnings(root, state, step, count=3, **options):
    with lines(logging.WARNING) as said, manager(root, **options) as saves:
        for number in range(count):
            saves.save(number, state)
            saves.wait()
            step()
    return [each for each in said if "have the same values" in each]


def _trained(rate=0.1):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step():
        model(torch.ones(64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("journal", [False, True])
def test_a_frozen_copy_is_named(with_optimizer, journal, tmp_path):
    model, optimizer, step = _trained()
    state = {"net": copy.deepcopy(model)}
    if with_optimizer:
        state["optimizer"] = optimizer
    (first, second) = _warnings(tmp_path, state, step, journal=journal)
    assert "steps 0 and 1" in first
    assert "steps 1 and 2" in second
    assert "'net'" in first


@pytest.mark.parametrize("wrap", [lambda each: each, Trainable])
def test_a_model_that_is_trained_is_not(wrap, tmp_path):
    model, optimizer, step = _trained()
    assert _warnings(tmp_path, {"net": wrap(model), "optimizer": optimizer}, step) == []


def test_what_does_not_change_for_a_reason_is_not(tmp_path):
    model, optimizer, step = _trained(rate=0.0)
    assert _warnings(tmp_path / "rate", {"net": model, "optimizer": optimizer}, step) == []
    model, optimizer, _ = _trained()
    assert _warnings(tmp_path / "step", {"net": model, "optimizer": optimizer}, lambda: None) == []
    model, optimizer, step = _trained()
    frozen = torch.nn.Linear(64, 64).requires_grad_(False)
    state = {"net": model, "base": frozen, "optimizer": optimizer}
    assert _warnings(tmp_path / "base", state, step) == []


def test_one_of_two_models_may_wait_for_its_turn(tmp_path):
    model, optimizer, step = _trained()
    other = torch.nn.Linear(64, 64)
    state = {"net": model, "critic": other, "optimizer": optimizer}
    assert _warnings(tmp_path, state, step) == []
