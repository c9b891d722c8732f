"""Nested values, taken apart and put together; and what is stored of an optimizer, as its ``state_dict()`` gave it."""

import random
from collections import OrderedDict, deque

import pytest
import torch
from support.state.checkpoints import assert_same
from support.tiers import sampled

import dcp_datastates as ds
from dcp_datastates.format.structure import packed_optimizer, put_together, taken_apart
from dcp_datastates.manager.frameworks import state_of


def _value(draws, depth):
    kinds = ["tensor", "atom", "dict", "list", "tuple", "ordered", "object"]
    match draws.choice(kinds if depth else kinds[:2]):
        case "tensor":
            return torch.rand(draws.randrange(3))
        case "atom":
            return draws.choice([None, 1, True, 2.5, "text", b"bytes", ()])
        case "dict":
            keys = draws.sample([0, 1, "0", "1", "a.b", "a", 2.5, None, (1, 2)], draws.randrange(5))
            return {key: _value(draws, depth - 1) for key in keys}
        case "list":
            return [_value(draws, depth - 1) for _ in range(draws.randrange(4))]
        case "tuple":
            return tuple(_value(draws, depth - 1) for _ in range(draws.randrange(4)))
        case "ordered":
            return OrderedDict((f"k{n}", _value(draws, depth - 1)) for n in range(2))
    return deque([1, 2], maxlen=3)


def _same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            _same(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


@pytest.mark.parametrize("seed", sampled(range(500), keep=range(50)))
def test_a_value_comes_back_with_its_types(seed):
    value = _value(random.Random(seed), 4)
    tensors, structure = taken_apart(value)
    assert all(isinstance(path, str) for path in tensors)
    assert type(structure) is tuple
    assert _same(put_together(structure, lambda path: tensors[path]), value)


class WithNumbers(torch.optim.SGD):
    """Keeps its state under keys that are numbers, and in containers."""

    def step(self, closure=None):
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


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stored", [False, True])
def test_a_state_comes_back_as_it_was(tmp_path, kind, groups, stored):
    if kind == "lbfgs" and groups == 2:
        groups = 1  # it takes no more
    torch.manual_seed(0)  # LBFGS diverges from some others
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    parts = [model] if groups == 1 else reversed(model)
    given = [{"params": list(part.parameters())} for part in parts]
    optimizer = OPTIMIZERS[kind](given)

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(1, 2)).sum()
        value.backward()
        return value

    optimizer.step(loss)
    state = state_of({"model": model, "optimizer": optimizer})["optimizer"]
    if stored:
        ds.save({"optimizer": state}, tmp_path / "x")
        state = ds.load(tmp_path / "x")["optimizer"]
    assert_same(packed_optimizer(state), optimizer.state_dict())
