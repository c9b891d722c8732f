"""Models sharded every way, with sizes that divide by nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    """Sizes that divide by nothing: 3 rows and 1 leave ranks of four with no bytes at all.

    ``hidden`` must divide by the tensor-parallel size for a forward pass, not for being saved.
    """

    def __init__(self, seed: int = 0, hidden: int = 254) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            [nn.Linear(130, hidden), nn.Linear(hidden, 130, bias=False), nn.Linear(130, 3)]
        )
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[1](self.layers[0](x).relu())
        return self.layers[2](hidden) * self.scale


def fsdp_tp(model: nn.Module, shape: tuple[int, int]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard over a (data, tensor) mesh of ``shape``, and step twice with made-up gradients."""
    data, tensor = shape
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    if tensor > 1:
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
    if data > 1:
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    step_twice(model, optimizer)
    return model, optimizer


def step_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 + 1
        optimizer.step()
        optimizer.zero_grad()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One real iteration."""
    model(torch.randn(4, 130)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Live tensors of model and optimizer by name."""
    state = dict(model.state_dict())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, moments in optimizer.state.items():
        for key, value in moments.items():
            state[f"optimizer.{names[id(parameter)]}.{key}"] = value
    return state


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, gathered from every rank."""
    dense = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return dense.detach().clone()
