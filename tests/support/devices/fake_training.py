"""Training on a fake device, and saves of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesWriter
from support.devices.fake_cuda import FakeCuda

CACHE = 64 << 20


class Stepper(torch.optim.Optimizer):
    """Its step is a kernel for each tensor: every value grows by one."""

    def __init__(
        self, cuda: FakeCuda, parameters: dict[str, torch.Tensor], device: int = 0
    ) -> None:
        super().__init__(list(parameters.values()), {})
        self.cuda = cuda
        self.device = device
        self.named = parameters
        self.values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for parameter in parameters.values():
            cuda.adopt(parameter, device)
        dcp_datastates.track(self)

    def step(self, closure: Any = None) -> None:
        for name, parameter in self.named.items():
            self.values[name] = self.values[name] + 1
            self.cuda.write(parameter, self.values[name], self.device)

    def write_all(self, amount: float) -> None:
        """As ``p.add_(amount)`` of all, without a step: the version counters move."""
        for name, parameter in self.named.items():
            self.values[name] = self.values[name] + amount
            self.cuda.write(parameter, self.values[name], self.device)
            torch.autograd.graph.increment_version(parameter)

    def now(self) -> dict[str, torch.Tensor]:
        """What the stream will have made of the parameters, when all that it was given has run."""
        return {name: values.clone() for name, values in self.values.items()}


def model(count: int = 3, rows: int = 257, columns: int = 1024) -> dict[str, torch.Tensor]:
    return {
        f"layer.{index}": torch.nn.Parameter(torch.randn(rows, columns)) for index in range(count)
    }


def load(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.full_like(value, -1) for name, value in like.items()}
    dcp.load(found, storage_reader=DataStatesReader(path))
    return found


def differing(path: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    found = load(path, expected)
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def writer(path: Path, **options: Any) -> DataStatesWriter:
    return DataStatesWriter(
        path, **{"host_cache_size": CACHE, "read_window": "immediate", **options}
    )


def save(path: Path, state: dict[str, Any], **options: Any) -> Any:
    return dcp.async_save(state, storage_writer=writer(path, **options))
