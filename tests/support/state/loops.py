"""A training loop for ``CheckpointManager``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcp_datastates import CheckpointManager, RngState
from support.state.checkpoints import CACHE

__all__ = ["Loop", "manager"]


def manager(root: Path, every: Any = 1, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, every=every, **{"host_cache_size": CACHE, **options})


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
        return float(loss)
