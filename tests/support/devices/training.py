"""Small training runs whose tensors are large enough to be deferred (64 KiB and up)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["OPTIMIZERS", "TrainingRun", "in_backward"]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adamw loop": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
}


class _Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.output = nn.Linear(width, width, bias=False)
        self.register_buffer("calls", torch.zeros(20_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.output(self.norm(self.input(x)).relu())


class TrainingRun:
    """A model, its optimizer, and steps. ``width`` 256 gives matrices of 256 KiB."""

    def __init__(self, optimizer: str = "adamw foreach", width: int = 256, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.width = width
        self.model = _Net(width)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def forward_backward(self) -> None:
        self.model(torch.randn(4, self.width)).square().sum().backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Live tensors by name: no copies."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        moments = {
            f"{names[id(parameter)]}.{key}": value
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        return {"model": dict(self.model.state_dict(keep_vars=False)), "optimizer": moments}


def in_backward(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer per parameter, each stepping inside backward, as soon as its gradient is there."""
    optimizers = []
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        optimizers.append(optimizer)

        def step(param: torch.Tensor, mine: torch.optim.Optimizer = optimizer) -> None:
            mine.step()
            mine.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return optimizers
