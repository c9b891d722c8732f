"""A state that looks almost as it did at the save before: what is remembered of that must not be used."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from support.jobs.ranks import ranks
from support.state.checkpoints import assert_same, entries, load, load_everything, zeros
from support.state.planners import save_by, saved_alone, saver
from support.state.states import filled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesSavePlanner


def _values(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(100)


def _planner_and_writer(path):
    return DataStatesSavePlanner(), saver(path, reads="all")


def _save_and_load(tensor, planner, by, shared_dir):
    """Saved as ``w``, on all ranks, it is found again, whole."""
    save_by({"w": tensor}, by, planner)
    whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor
    found = load({"w": torch.zeros_like(whole)}, shared_dir / "c")
    assert torch.equal(found["w"], whole)
    dist.barrier()


def _in_turn(number, *choices):
    return choices[number % len(choices)]


def _shared(whole, placement):
    """On a mesh of both ranks."""
    return distribute_tensor(whole, init_device_mesh("cpu", (2,)), [placement], src_data_rank=None)


ALIKE = {
    "dtype": lambda n: _values((300, 70), n).to(_in_turn(n, torch.float32, torch.int32)),
    "width": lambda n: _values((300, 70), n).to(
        _in_turn(n, torch.float32, torch.float64, torch.bfloat16)
    ),
    "shape": lambda n: _values(_in_turn(n, (300, 70), (70, 300), (21_000,)), n),
    "shards of another whole": lambda n: _shared(
        _values(_in_turn(n, (600, 300), (300, 600)), n), Shard(n % 2)
    ),
    "a replica, or a shard": lambda n: _shared(
        _values(_in_turn(n, (300, 300), (600, 300)), n), _in_turn(n, Replicate(), Shard(0))
    ),
    "requires_grad": lambda n: _shared(_values((400, 300), n), Shard(0)).requires_grad_(n % 2 == 0),
}
"""Tensors whose parts on a rank differ in one property alone from one save to the next."""


@ranks(2)
@pytest.mark.parametrize("kind", ALIKE)
def test_a_tensor_that_looks_like_that_of_the_save_before(kind, shared_dir):
    planner, by = _planner_and_writer(shared_dir / "c")
    for number in range(6):
        tensor = ALIKE[kind](number)
        _save_and_load(tensor, planner, by, shared_dir)
        properties = entries(shared_dir / "c")["w"].properties
        assert properties.dtype == tensor.dtype
        assert properties.requires_grad == tensor.requires_grad
        dist.barrier()


@ranks(1)
def test_one_tensor_under_two_names_and_then_two(shared_dir):
    planner = DataStatesSavePlanner()
    shared = filled((70_000,), torch.float32, 1)
    for number in range(4):
        two = {"a": filled((70_000,), torch.float32, 2), "b": filled((70_000,), torch.float32, 3)}
        state = two if number % 2 else {"a": shared, "b": shared}
        saved_alone(state, planner, shared_dir / "c", reads="all")
        assert_same(load(zeros(state), shared_dir / "c"), state)


@ranks(1)
def test_values_that_memory_does_not_show(shared_dir):
    planner = DataStatesSavePlanner()
    for number in range(4):
        plain = torch.full((70_000,), complex(number, 2), dtype=torch.complex64)
        state = {"a": plain.conj() if number % 2 else plain}
        saved_alone(state, planner, shared_dir / "c", reads="all")
        found = load({"a": torch.zeros(70_000, dtype=torch.complex64)}, shared_dir / "c")
        assert torch.equal(found["a"], state["a"].resolve_conj())


@ranks(1)
def test_numbers_of_any_length_and_numbers_that_are_equal(shared_dir):
    planner = DataStatesSavePlanner()
    for sign in (1, -1):
        state = {"long": sign * 10**5000, "one": 1, "true": True, "float": 1.0, "zero": sign * 0.0}
        saved_alone(state, planner, shared_dir / "c")
        found = load_everything(shared_dir / "c")
        assert found == state
        assert {name: type(value) for name, value in found.items()} == {
            name: type(value) for name, value in state.items()
        }
        assert math.copysign(1.0, found["zero"]) == sign


class _List(list):
    pass


@ranks(1)
def test_lists_of_a_class_of_their_own(shared_dir):
    planner = DataStatesSavePlanner()
    for number, value in enumerate(([1, 2], [torch.ones(5), 1], [3, 4], [torch.zeros(5), 2])):
        saved_alone({"a": _List(value)}, planner, shared_dir / "c")
        names = set(entries(shared_dir / "c"))
        assert names == ({"a.0", "a.1"} if number % 2 else {"a"})


@ranks(1)
def test_keys_that_are_equal_and_named_differently_are_told_apart(shared_dir):
    planner, by = DataStatesSavePlanner(), saver(shared_dir / "c")
    for key in (1, True, 1, True):
        state = {"a": {key: torch.full((5,), float(key))}}
        dcp_datastates.async_save(state, writer=by, planner=planner).upload_completion.result(60)
        assert set(entries(shared_dir / "c")) == {f"a.{key}"}


@ranks(2)
def test_optimizer_state_that_appears_and_a_parameter_that_is_frozen(shared_dir):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(200, 300)) for _ in range(4)]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    planner, by = DataStatesSavePlanner(), saver(shared_dir / "c")

    def state():
        return {
            "weights": {f"w{i}": weight for i, weight in enumerate(weights)},
            "optim": {
                f"w{i}": dict(optimizer.state[w])
                for i, w in enumerate(weights)
                if w in optimizer.state
            },
        }

    seen = []
    for step in range(6):
        if step == 3:
            weights[1].requires_grad_(False)
        if step:
            sum((weight**2).sum() for weight in weights).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = {
            "weights": {name: w.detach().clone() for name, w in state()["weights"].items()},
            "optim": {
                name: {key: value.clone() for key, value in of.items()}
                for name, of in state()["optim"].items()
            },
        }
        seen.append(save_by(state(), by, planner))
        assert_same(load(zeros(expected), shared_dir / "c"), expected)
    assert seen[0] is False
    assert seen[1] is False, "the optimizer's state appeared"
    assert seen[2] is True
    assert seen[5] is True


@ranks(4)
def test_ranks_that_save_nothing_and_objects_that_grow(shared_dir):
    planner, by = DataStatesSavePlanner(), saver(shared_dir / "c")
    for number in range(4):
        state = {"log": "x" * (10 ** (number + 1)), "n": number} if dist.get_rank() == 1 else {}
        save_by(state, by, planner)
        loaded = {"log": "", "n": -1}
        load(loaded, shared_dir / "c")
        assert loaded == {"log": "x" * (10 ** (number + 1)), "n": number}


@ranks(2)
def test_a_state_that_is_not_flattened_is_what_it_was_at_the_call(shared_dir):
    planner = DataStatesSavePlanner(flatten_state_dict=False)
    by = saver(shared_dir / "c")
    for number in range(4):
        state = {f"r{dist.get_rank()}": {"w": torch.full((50,), float(number)), "n": number}}
        response = dcp_datastates.async_save(state, writer=by, planner=planner)
        state[f"r{dist.get_rank()}"]["w"].zero_()
        response.upload_completion.result(60)
        found = load_everything(shared_dir / "c", DataStatesReader(shared_dir / "c"))
        mine = found[f"r{dist.get_rank()}"]
        assert torch.equal(mine["w"], torch.full((50,), float(number)))
        assert mine["n"] == number
        dist.barrier()
