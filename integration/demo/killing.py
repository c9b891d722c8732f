"""The end of the first job: SIGKILL to every rank, in the middle of a save."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch.distributed as dist

from checkpoints import has_begun, is_committed, step_path
from events import Killed, Phase, emit


class Killer:
    """Kills all ranks once a save from ``iteration`` on is caught with files begun but no commit."""

    def __init__(self, root: Path, phase: Phase, iteration: int) -> None:
        """Collective over the default group, whose ranks are processes of this machine."""
        self._root = root
        self._phase: Phase = phase
        self._iteration = iteration
        ranks: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(ranks, os.getpid())
        self._ranks = ranks

    def watch(self, iteration: int) -> None:
        """Call on one rank when the save of ``iteration`` has been started."""
        if iteration >= self._iteration:
            threading.Thread(target=self._lie_in_wait, args=(iteration,), daemon=True).start()

    def _lie_in_wait(self, iteration: int) -> None:
        checkpoint = step_path(self._root, iteration)
        while not has_begun(checkpoint):
            time.sleep(5e-4)
        if is_committed(checkpoint):
            return  # too late for this one
        emit(Killed(self._phase, iteration))
        others = [rank for rank in self._ranks if rank != os.getpid()]
        for rank in [*others, os.getpid()]:
            os.kill(rank, signal.SIGKILL)
