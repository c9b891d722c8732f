"""Timing one save of one contender in one situation."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from contenders import Contender
from workload import Workload

Situation: TypeAlias = Literal["step", "train", "idle"]

SITUATIONS: dict[Situation, str] = {
    "step": "async_save, then optimizer.step() at once",
    "train": "async_save, then forward, backward, optimizer.step()",
    "idle": "async_save, then nothing but waiting",
}


@dataclass(frozen=True)
class Sample:
    """Seconds, of one save."""

    call: float
    """Inside ``async_save`` (for stock with the writer's construction, as for ours)."""
    gate: float
    """Waiting in, or for, ``optimizer.step()`` until the state may change."""
    iteration: float
    """The call, forward and backward where there are any, the gate and the step."""
    commit: float
    """From the call to the commit."""

    @property
    def stall(self) -> float:
        return self.call + self.gate


def measure(contender: Contender, workload: Workload, situation: Situation, path: Path) -> Sample:
    """Save once to ``path`` (removed afterwards)."""
    workload.forward_backward()
    state = workload.state_dict()
    begun = time.perf_counter()
    save = contender.save(state, path, training=situation != "idle")
    call = time.perf_counter() - begun
    gate = _iterate(workload, situation, save.before_step)
    iteration = time.perf_counter() - begun
    commit = save.commit_seconds()
    gate += save.gate_seconds()
    del state, save
    shutil.rmtree(path)
    return Sample(call, gate, iteration, commit)


def measure_without_save(workload: Workload, situation: Situation) -> float:
    """Seconds of the same iteration when nothing is saved."""
    workload.forward_backward()
    begun = time.perf_counter()
    _iterate(workload, situation, lambda: 0.0)
    return time.perf_counter() - begun


def _iterate(workload: Workload, situation: Situation, before_step: Callable[[], float]) -> float:
    """One iteration; seconds that ``before_step`` waited."""
    if situation == "idle":
        return 0.0
    if situation == "train":
        workload.forward_backward()
    waited = before_step()
    workload.optimizer.step()
    return waited
