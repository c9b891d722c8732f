"""Iterations of a job, timed by the GPU's own clock where there is one."""

from __future__ import annotations

import time
from typing import Any

import torch

from gpu_job import Job

__all__ = ["Iterations", "milliseconds"]


class Iterations:
    """Times from one mark to the next. Nothing waits for the GPU until :meth:`seconds`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._marks: list[Any] = []
        job.synchronize()
        self._mark()

    def _mark(self) -> None:
        if self._job.shape.device != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def iterate(self, before_step: Any = None) -> float:
        """One iteration; the host's seconds before and in its step."""
        self._job.forward_backward()
        began = time.perf_counter()
        if before_step is not None:
            before_step()
        self._job.step()
        waited = time.perf_counter() - began
        self._mark()
        return waited

    def seconds(self) -> list[float]:
        """Of each iteration so far. On a GPU, time in which it has nothing to do counts, too."""
        self._job.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._job.shape.device != "cuda":
            return [after - before for before, after in pairs]
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def milliseconds(seconds: list[float]) -> list[float]:
    return [round(1e3 * each, 3) for each in seconds]
