"""The items of a flattened state are those that DCP makes, however alike its tensors look."""

from __future__ import annotations

import random

import pytest
import torch
from support.jobs.ranks import ranks
from support.state.plans import with_hints
from support.tiers import tries
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_datastates.errors import UnsupportedTensorError
from dcp_datastates.planning.flat_state import FlatState

PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


class Subclass(torch.Tensor):
    """A tensor that only DCP should look at."""


def _tensor(chance):
    """Few shapes and properties, so that many tensors look alike but for one of them."""
    shape = chance.choice([(8, 4), (4, 8), (0, 4), (3, 4)])
    tensor = torch.zeros(shape, dtype=chance.choice([torch.float32, torch.int32]))
    if chance.random() < 0.2:
        tensor = tensor.t()
    return tensor.requires_grad_(tensor.is_floating_point() and chance.random() < 0.3)


def _placed(chance, meshes):
    mesh = chance.choice(meshes)
    placements = [chance.choice(PLACEMENTS) for _ in range(mesh.ndim)]
    return DTensor.from_local(_tensor(chance), mesh, placements, run_check=False)


def _value(chance, meshes):
    kind = chance.randrange(10)
    if kind < 4:
        return _placed(chance, meshes)
    if kind < 7:
        return _tensor(chance)
    if kind == 7:
        return torch.nn.Parameter(_tensor(chance).detach().float())
    if kind == 8:
        return _tensor(chance).detach().as_subclass(Subclass)
    return chance.choice([3, "text", [1, [torch.zeros(8, 4)]], {"in": torch.zeros(8, 4)}])


@ranks(4)
@pytest.mark.parametrize("count", tries(30, 300))
def test_the_items_are_those_of_dcp(count):
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    meshes += [DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [3, 1, 0, 2])]
    for seed in range(count):
        chance = random.Random(seed)
        state = {f"v{number}": _value(chance, meshes) for number in range(60)}
        flat = FlatState(state, flatten=True, flatten_shards=True, is_coordinator=seed % 2 == 0)
        stock = create_default_local_save_plan(flat.values, seed % 2 == 0).items
        assert with_hints(flat.items()) == with_hints(stock), seed


def test_a_tensor_that_cannot_be_stored_is_named():
    state = {"a": torch.zeros(2), "n": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)])}
    flat = FlatState(state, flatten=True, flatten_shards=True, is_coordinator=True)
    with pytest.raises(UnsupportedTensorError, match=r"'n'.*: it is nested"):
        flat.items()
