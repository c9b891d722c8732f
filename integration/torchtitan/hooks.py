"""What tests change in the ranks of a job, before it begins."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist


def kill_after(step: int, rank: int) -> None:
    """SIGKILL to ``rank`` as soon as the call that saves ``step`` has returned."""
    from torchtitan.components.checkpointer.base import BaseCheckpointManager

    original = BaseCheckpointManager.save

    def save(self: Any, curr_step: int, last_step: bool = False) -> bool:
        saved: bool = original(self, curr_step, last_step)
        if curr_step == step and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return saved

    BaseCheckpointManager.save = save


def read_late(gate: bool) -> None:
    """Let no gradient start the reads, so that the step gate alone holds the optimizer back; or nothing, without it. A
    wait for saves starts them, as ever.
    """
    from dcp_datastates.manager.save_tracker import SaveTracker
    from dcp_datastates.staging import step_gate
    from dcp_datastates.staging.deferred_reads import DeferredReads

    really_open, drain = step_gate.open_windows, SaveTracker.drain
    step_gate.open_windows = lambda: None
    SaveTracker.drain = lambda self, until=None: (really_open(), drain(self, until))[1]  # type: ignore[method-assign]
    if not gate:
        DeferredReads.release_for = lambda self, optimizer, on_host: None  # type: ignore[method-assign]


def no_collective_on_default_group() -> None:
    """Refuse DCP's collectives on the default group while a checkpoint is saved, as NCCL would on CPU tensors."""
    from dcp_datastates.torchtitan import DataStatesCheckpointManager

    saving = False

    def guarded(name: str) -> Any:
        original = getattr(dist, name)

        def collective(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            if saving and group in (None, dist.group.WORLD):
                raise AssertionError(f"{name} on the default group")
            return original(*args, **kwargs)

        return collective

    for name in (
        "all_gather_object",
        "all_reduce",
        "barrier",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
    ):
        setattr(dist, name, guarded(name))
    original = DataStatesCheckpointManager._save

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal saving
        saving = True
        try:
            return original(self, *args, **kwargs)
        finally:
            saving = False

    DataStatesCheckpointManager._save = save  # type: ignore[method-assign]


def time_saves(folder: str) -> None:
    """Write to ``folder/N.json``, for rank N, what saves took from the training: seconds by kind, for each step."""
    from torchtitan.components.checkpointer.base import BaseCheckpointManager
    from torchtitan.trainer import Trainer

    from dcp_datastates.staging.deferred_reads import DeferredReads

    steps: list[dict[str, float]] = []

    def timed(owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(self, *args, **kwargs)
            finally:
                steps[-1][kind] += time.perf_counter() - began

        setattr(owner, name, call)

    timed(BaseCheckpointManager, "save", "save")
    timed(BaseCheckpointManager, "maybe_wait_for_saving", "previous")
    timed(BaseCheckpointManager, "maybe_wait_for_staging", "staging")
    timed(DeferredReads, "release_for", "gate")
    timed(Trainer, "train_step", "step")
    train_step, close = Trainer.train_step, Trainer.close

    def new_step(self: Any, *args: Any) -> Any:
        steps.append(dict.fromkeys(("save", "previous", "staging", "gate", "step"), 0.0))
        return train_step(self, *args)

    def write(self: Any) -> None:
        Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(steps))
        close(self)

    Trainer.train_step, Trainer.close = new_step, write
