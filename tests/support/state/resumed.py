"""A training job that dies and is resumed, with or without a planted defect."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcp_datastates import PerRank
from dcp_datastates.journal.audit import Audit
from support.state.loops import Loop, manager

DEFECTS = {
    "no loader": "add the loader to the state",
    "no generator": "add RngState() to the state",
    "a copy": "the state has a copy of it",
    "no optimizer": "The optimizer's state was not restored",
    "moments dropped": "The optimizer's state was not restored",
    "a loader that loses its place": "the loader's state does not have all of its place",
    "no scheduler": "another learning rate (is the scheduler in the state?)",
    "a bit": "The restore was exact",
}
"""What is wrong with the program, or with its resume; and what the audit says about it."""

FLIPPED = 7
"""The step after the resume at which a bit flips."""


class Data:
    """A loader with a place."""

    def __init__(self, forgets: bool = False) -> None:
        self.place, self.forgets = 0, forgets

    def __next__(self) -> torch.Tensor:
        self.place += 1
        return torch.full((4, 8), 1.0 / self.place)

    def state_dict(self) -> dict[str, int]:
        return {"place": 0 if self.forgets else self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Job(Loop):
    """The loop, with a loader and maybe with a defect."""

    def __init__(self, seed: int, defect: str) -> None:
        random.seed(seed)
        np.random.seed(seed)
        super().__init__(seed)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.95)
        self.state["scheduler"] = self.scheduler
        self.data = Data(forgets=defect == "a loader that loses its place")
        self.state["loader"] = PerRank(self.data)
        left_out = {"generator": "rng"}.get(part := defect.removeprefix("no "), part)
        self.state.pop(left_out, None)
        if defect == "a copy":  # an optimizer in the state would bring its parameters along
            self.state["model"] = copy.deepcopy(self.model)
            del self.state["optimizer"]

    def step(self) -> float:
        noise = random.random() + float(np.random.rand())
        loss = (self.model(torch.randn(4, 8) + next(self.data)) + noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())


def train(
    root: Path, end: int, *, seed: int = 0, defect: str = "", scale: float = 1.0, **options: Any
) -> Audit | None:
    """Train up to step ``end``, saving every 15th; what the manager says of the resume. ``scale``: of the losses that
    the job tells.
    """
    job = Job(seed, defect)
    options = {"every": 15, "journal": True, "save_last": False, **options}
    with manager(root, **options) as saves:
        exclude = "optimizer.state" if defect == "moments dropped" else ()
        done = saves.restore_latest(job.state, exclude=exclude)
        for number, step in enumerate(range(0 if done is None else done + 1, end), start=1):
            loss = job.step()
            if done is not None and defect == "a bit" and number == FLIPPED:
                flip(job.model[0].weight)
            saves.save(step, job.state, {"loss": loss * scale})
            if saves.stopping:
                break
        return saves.audit


def flip(parameter: torch.Tensor) -> None:
    """Flip a bit of the first element."""
    with torch.no_grad():
        parameter.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
