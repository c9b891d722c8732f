"""Ordinary torch code whose tensors are on the fake device: what the fake promises, and saves of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.devices.fake_cuda import CACHE, FakeCuda, differing, save
from support.tiers import tries
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_datastates

LATE = {"max_delay_us": 20000, "piece": 16384}
"""Kernels and copies begin late, and run piece by piece."""


@pytest.fixture(params=["plain", "FSDP2"])
def make_model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], nn.Module]]:
    """Makes the same model each time, on the host."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256))
        if request.param == "FSDP2":
            for module in (*model, model):
                fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        return model

    if request.param == "FSDP2":
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield make
    if request.param == "FSDP2":
        dist.destroy_process_group()


def stepped_by(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    dcp_datastates.track(optimizer)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().sum().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = dict(model.state_dict())
    for index, values in optimizer.state_dict()["state"].items():
        state.update({f"{index}.{name}": value for name, value in values.items()})
    return state


# ---- the fake --------------------------------------------------------------------------------------


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda w: w.add_(1),
    "clamp_": lambda w: w.clamp_(min=0),
    "indexed": lambda w: w.__setitem__((slice(None), 3), 7.0),
    "index_put_": lambda w: w.index_put_((torch.tensor([0, 5]),), torch.tensor(2.0)),
    "out=": lambda w: torch.add(w, 1, out=w),
    "_foreach_": lambda w: torch._foreach_mul_([w, w.t()], 2.0),
    ".data": lambda w: w.data.zero_(),
    "a view": lambda w: w.t()[1:3].fill_(4),
    "from the host": lambda w: w.copy_(torch.ones(64, 64)),
    "made on the device": lambda w: w.copy_(w @ w),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_an_operation_is_a_kernel(cuda: FakeCuda, write: Callable[..., object]) -> None:
    """Torch counts it at once; the memory changes when the driver pleases, and to what torch says."""
    start = torch.randn(64, 64)
    on_host, on_device = start.clone(), cuda.adopt(start.clone())
    with cuda.kernels():
        cuda.lib.fake_cuda_stall(1)
        before = on_host._version, on_device._version
        write(on_host)
        write(on_device)
        assert on_host._version - before[0] == on_device._version - before[1]
        assert torch.equal(cuda.values(on_device), on_host)
        assert torch.equal(cuda.memory(on_device), start)
        cuda.lib.fake_cuda_stall(0)
        cuda.synchronize()
        assert torch.equal(cuda.memory(on_device), on_host)


# ---- saves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("saves", tries(2, 4))
@pytest.mark.parametrize("window", ["backward", "immediate"])
def test_saves_of_training(
    cuda: FakeCuda, make_model: Callable[[], nn.Module], tmp_path: Path, window: str, saves: int
) -> None:
    model = cuda.adopt_module(make_model())
    optimizer = stepped_by(model)
    cuda.await_pinned(CACHE)
    with cuda.kernels():
        for index in range(saves):
            cuda.configure(seed=index + 1, max_delay_us=5000, piece=16384)
            step(model, optimizer)
            state = state_of(model, optimizer)
            expected = {name: cuda.values(value) for name, value in state.items()}
            future = save(tmp_path / f"{index}", state, reads=window)
            step(model, optimizer)
            step(model, optimizer)
            future.result()
            assert differing(tmp_path / f"{index}", expected) == []
    assert cuda.count("violations") == cuda.count("early_unregistrations") == 0


def test_memory_that_the_program_frees_is_not_reused_before_it_was_read(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    """The allocator gives it to the next tensor at once: only references keep it."""
    cuda.await_pinned(CACHE)
    source = cuda.adopt(torch.zeros(300, 1000))
    with cuda.kernels():
        for seed in range(4):
            cuda.configure(seed=seed + 1, **LATE)
            parameter = nn.Parameter(source + seed)
            dcp_datastates.track(torch.optim.SGD([parameter]))
            strided = (source + 10 * seed).t()
            future = save(tmp_path / f"{seed}", {"w": parameter.detach(), "strided": strided})
            del parameter, strided
            for _ in range(3):
                (source - 7).mul_(2)  # would take its place
            future.result()
            expected = {
                "w": torch.full((300, 1000), float(seed)),
                "strided": torch.full((1000, 300), 10.0 * seed),
            }
            assert differing(tmp_path / f"{seed}", expected) == []
    assert cuda.pool.reused > 0
