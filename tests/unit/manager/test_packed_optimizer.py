"""What is stored of an optimizer, as its ``state_dict()`` gave it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_datastates as ds
from dcp_datastates.manager.frameworks import state_of
from dcp_datastates.manager.structure import packed_optimizer


class WithNumbers(torch.optim.SGD):
    """Keeps its state under keys that are numbers, and in containers."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {0: torch.ones(2), "of": [torch.zeros(1), {1: "one"}]}
        return super().step(closure)


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd without a state": torch.optim.SGD,
    "lbfgs": torch.optim.LBFGS,
    "numbers": WithNumbers,
    "a rate that is a tensor": lambda groups: torch.optim.AdamW(
        groups, lr=torch.tensor(0.5), foreach=False
    ),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stored", [False, True])
def test_a_state_comes_back_as_it_was(tmp_path: Path, kind: str, groups: int, stored: bool) -> None:
    if kind == "lbfgs" and groups == 2:
        groups = 1  # it takes no more
    torch.manual_seed(0)  # LBFGS diverges from some others
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    parts = [model] if groups == 1 else reversed(model)
    given = [{"params": list(part.parameters())} for part in parts]
    optimizer = OPTIMIZERS[kind](given)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(1, 2)).sum()
        value.backward()
        return value

    optimizer.step(loss)
    state = state_of({"model": model, "optimizer": optimizer})["optimizer"]
    if stored:
        ds.save({"optimizer": state}, tmp_path / "x")
        state = ds.load(tmp_path / "x")["optimizer"]
    assert same(packed_optimizer(state), optimizer.state_dict())
