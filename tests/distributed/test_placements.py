"""Random shapes, dtypes, meshes and placements against a dense reference, on four real ranks."""

from __future__ import annotations

import random

import pytest
import torch
from support.jobs.groups import own_group
from support.jobs.ranks import run_on_ranks
from support.state.checkpoints import (
    assert_same,
    async_save,
    bits,
    load_by_both,
    load_everything,
    save,
    zeros,
)
from support.state.states import filled
from support.tiers import sampled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64),
    *(torch.float64, torch.int16),
]
MESHES = {4: [(4,), (2, 2), (4, 1), (1, 4)], 2: [(2,), (2, 1)], 1: [(1,)]}
TENSORS = 12


def _shapes(chance):
    for _ in range(TENSORS):
        yield tuple(chance.choice([0, 1, 2, 3, 5, 7, 16, 33]) for _ in range(chance.randint(1, 3)))
    yield (70_001, 3)


def _dense(seed):
    """The reference, alike on every rank."""
    chance = random.Random(seed)
    return {
        f"t{number}": filled(shape, chance.choice(DTYPES), seed * 100 + number)
        for number, shape in enumerate(_shapes(chance))
    }


def _distribute(dense, shape, seed):
    """Every tensor placed by chance, but alike on every rank; some left plain."""
    chance = random.Random(seed)
    mesh = init_device_mesh("cpu", shape)
    state = {}
    for name, tensor in dense.items():
        placements = [
            chance.choice([Replicate(), *(Shard(d) for d in range(tensor.dim()))]) for _ in shape
        ]
        if chance.random() < 0.1:
            state[name] = tensor.clone()
        else:
            state[name] = _placed(tensor, mesh, placements)
    return state


def _placed(tensor, mesh, placements):
    # distribute_tensor moves bytes with collectives that not every dtype has: shard bit patterns by hand
    local = tensor
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = (
                local.chunk(mesh.size(dimension), placement.dim)
                if local.size(placement.dim)
                else ()
            )
            coordinate = mesh.get_local_rank(dimension)
            empty = local.narrow(placement.dim, 0, 0)
            local = chunks[coordinate] if coordinate < len(chunks) else empty
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _saves(seed, shape, path):
    state = _distribute(_dense(seed), shape, seed)
    if seed % 2:
        async_save(state, path, group=own_group(), reads="immediate").result(60)
    else:
        save(state, path)


def _loads(seed, placed_by, shape, path):
    expected = _distribute(_dense(seed), shape, placed_by)
    target = zeros(expected)
    load_by_both(target, path)
    for name, tensor in expected.items():
        assert bits(target[name]) == bits(tensor), (
            f"{name} {tensor.shape} {tensor.dtype} on {shape}"
        )


@pytest.mark.parametrize("seed", sampled(range(8), keep=range(2)))
def test_any_placement_loads_as_any_other(seed, shared_dir):
    chance = random.Random(1000 + seed)
    run_on_ranks(4, _saves, seed=seed, shape=chance.choice(MESHES[4]), path=shared_dir / "c")
    for world in (4, chance.choice([1, 2])):
        shape = chance.choice(MESHES[world])
        run_on_ranks(
            world, _loads, seed=seed, placed_by=chance.random(), shape=shape, path=shared_dir / "c"
        )
    run_on_ranks(1, _loads_everything, seed=seed, path=shared_dir / "c")


def _loads_everything(seed, path):
    assert_same(load_everything(path), _dense(seed))
