"""Nested values, taken apart and put together."""

import random
from collections import OrderedDict, deque

import pytest
import torch
from support.tiers import sampled

from dcp_datastates.format.structure import put_together, taken_apart


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
