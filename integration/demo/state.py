"""What a checkpoint of the job holds: model, optimizer, schedule, data position, RNG, counter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from data import Batches


class TrainingState:
    """Gathers everything that training changes into one state dict, and spreads it out again."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, batches: Batches
    ) -> None:
        self.iteration = 0
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule
        self._batches = batches

    def state_dict(self) -> dict[str, Any]:
        """Tensors are the live ones (no copies); the rest is of plain Python types."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self._schedule.state_dict(),
            "data": self._batches.state_dict(),
            "rng": torch.get_rng_state(),
            "iteration": self.iteration,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._schedule.load_state_dict(state["schedule"])
        self._batches.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])
        self.iteration = state["iteration"]
