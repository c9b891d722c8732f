"""Parameters that nothing trains: copied in each call, unless the program says that they need not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.state.checkpoints import CACHE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_datastates as ds

ROWS = 160  # 100 KiB: deferred
LATER = {"reads": 600.0, "host_cache_size": CACHE}


pytestmark = pytest.mark.usefixtures("one_rank")


class Adapted(torch.nn.Module):
    """Frozen layers, and a small one that is trained."""

    def __init__(self, sharded: bool, layers: int = 3) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (1,))

        def weight() -> torch.Tensor:
            dense = torch.randn(ROWS, ROWS) / 8
            return distribute_tensor(dense, mesh, [Shard(0)]) if sharded else dense

        self.base = torch.nn.ParameterList(
            torch.nn.Parameter(weight(), requires_grad=False) for _ in range(layers)
        )
        self.adapter = torch.nn.Parameter(weight())

    def forward(self) -> torch.Tensor:
        result: Any = self.adapter
        for weight in self.base:
            result = torch.tanh(result @ weight)
        return result.square().mean()  # type: ignore[no-any-return]


def made(sharded: bool) -> tuple[Adapted, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Adapted(sharded)
    optimizer = torch.optim.SGD([model.adapter], 0.1, momentum=0.9)
    ds.track(optimizer)
    return model, optimizer


def step(model: Adapted, optimizer: torch.optim.Optimizer) -> None:
    loss = model()
    (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
    optimizer.step()
    optimizer.zero_grad()


def frozen(model: Adapted) -> list[torch.Tensor]:
    return [each for each in model.parameters() if not each.requires_grad]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_frozen_parameters_are_not_copied_if_the_program_says_so(
    told: bool, sharded: bool, tmp_path: Path
) -> None:
    model, optimizer = made(sharded)
    if told:
        ds.track(optimizer, also=frozen(model))
    with ds.CheckpointManager(tmp_path, every=1, **LATER) as manager:
        for number in range(3):
            handle = manager.save(number, {"model": model, "optimizer": optimizer})
            assert handle is not None
            copied = handle.stats.eager_bytes
            assert copied < 1000 if told else copied >= 3 * 4 * ROWS * ROWS
            step(model, optimizer)
            handle.result()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("seen", [False, True])
def test_a_momentum_encoder_never_fails_a_save(seen: bool, sharded: bool, tmp_path: Path) -> None:
    """It is frozen, and changes in each forward pass, between the call and the step; perhaps unseen by torch."""
    model, optimizer = made(sharded)
    expected = {}
    with ds.CheckpointManager(tmp_path, every=1, max_failures=1, **LATER) as manager:
        for number in range(4):
            expected[number] = model.base[0].detach().clone()
            manager.save(number, {"model": model, "optimizer": optimizer})
            with torch.no_grad():
                target = model.base[0] if seen else model.base[0].data
                target.lerp_(model.adapter, 0.1)
            step(model, optimizer)
    for number, weight in expected.items():
        _check(tmp_path / f"step-{number}", {"base.0": weight})


def _check(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = ds.load(path)["model"]
    for name, weight in expected.items():
        dense = weight.full_tensor() if isinstance(weight, DTensor) else weight
        assert torch.equal(found[name], dense), name
