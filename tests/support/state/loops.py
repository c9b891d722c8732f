"""A training loop for ``CheckpointManager``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dcp_datastates import CheckpointManager, RngState, track
from support.state.checkpoints import CACHE


def manager(root: Path, every: Any = 1, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, every=every, **{"host_cache_size": CACHE, **options})


class Stateful:
    """An object with a state, which it gives and takes as it is."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loaded = 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loaded += 1
        self.state = state


def owned(
    elements: int = 1_000_000, value: float = 1.0
) -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
    """A parameter, which is read later, and its optimizer, with a gradient of 1 for its next step."""
    parameter = torch.nn.Parameter(torch.full((elements,), value))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    track(optimizer)
    parameter.grad = torch.ones_like(parameter)
    return {"w": parameter.detach()}, optimizer


class Loop:
    """A model with dropout, an optimizer, a scheduler, and data that depend on the generators."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "rng": RngState(),
            "seen": 0,
            "average": torch.zeros(()),
        }

    def step(self) -> float:
        noise = random.random() + float(np.random.rand())
        loss = (self.model(torch.randn(4, 8)) + noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.state["seen"] += 4
        self.state["average"] += loss.detach()
        return float(loss.detach())


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
