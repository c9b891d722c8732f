"""One rank of the demo's jobs: it trains, saves every iteration, and measures what the saves cost."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

from dcp_datastates import CheckpointManager, SaveHandle
from job import Job
from report import Run, Saved

ITERATIONS, RETAINED = 12, 3


class Save:
    """A save in flight, timed on this rank. ``start`` starts it."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._began = time.perf_counter()
        handle = start()
        self._call = self._now()
        self._stats = handle.stats if isinstance(handle, SaveHandle) else None
        self._future: Future[None] = handle if self._stats is None else handle.committed
        self._commit: Future[float] = Future()
        self._future.add_done_callback(lambda _: self._commit.set_result(self._now()))

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def finish(self, path: Path) -> Saved:
        """Wait for the commit; collective, the same result everywhere."""
        waits = self._now()
        self._future.result()
        iteration = self._now()
        commit = self._commit.result()  # the callback may come just behind the result
        gate, write = 0.0, commit - self._call
        if self._stats is not None:
            gate, write = self._stats.gate_seconds, self._stats.total_seconds or 0.0
        parts = [self._call + gate, self._call, gate, iteration - waits, commit, iteration, write]
        slowest = 1e3 * torch.tensor(parts, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        *parts, write = slowest.tolist()
        return Saved(size_of(path), size_of(path) / write / 1e6, *parts)


def train(job: Job, run: Run, checkpoints: Path, tell: Callable[[Run], None]) -> None:
    """Save after every iteration; each save waits for the one before."""
    group = dist.new_group(backend="gloo")  # stock must not share the group that trains
    manager = CheckpointManager(checkpoints, every=1, keep=RETAINED, max_failures=1)
    state = {"model": job.model, "optimizer": job.optimizer, "schedule": job.schedule}
    if run.phase == "resumed":
        run.resumed_from = manager.restore_latest(state) or 0
    save: Save | None = None
    for iteration in range(run.resumed_from + 1, ITERATIONS + 1):
        run.losses[iteration] = job.step(iteration)
        if save is not None:
            run.saves[iteration - 1] = save.finish(manager.path(iteration - 1))
        if run.phase == "stock":
            shutil.rmtree(manager.path(iteration - RETAINED), ignore_errors=True)
            model, optimizer = get_state_dict(job.model, job.optimizer)
            stock = {"model": model, "optimizer": optimizer, "schedule": job.schedule.state_dict()}
            writer = dcp.FileSystemWriter(manager.path(iteration))
            save = Save(partial(dcp.async_save, stock, storage_writer=writer, process_group=group))
        else:
            save = Save(partial(manager.save, iteration, state))
        tell(run)
    assert save is not None
    run.saves[ITERATIONS] = save.finish(manager.path(ITERATIONS))
    tell(run)
    manager.close()


def work(rank: int, ranks: int, root: Path, phases: list[str], told: Connection) -> None:
    """A rank of a job: FSDP2 and tensor parallelism on a 2 x 2 mesh; after the resume, FSDP2 alone."""
    log = os.open(root / f"{phases[0]}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):  # the screen is the driver's
        os.dup2(log, stream)
    torch.set_num_threads(1)
    meet = f"file://{root}/{phases[0]}.store"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    for phase in phases:
        layout, shape, names = "FSDP2 x TP", (ranks // 2, 2), ("dp", "tp")
        if phase == "resumed":
            layout, shape, names = "FSDP2", (ranks,), ("dp",)
        job = Job(init_device_mesh("cpu", shape, mesh_dim_names=names))
        run = Run(phase, ranks, layout, job.parameters)
        where = root / ("stock" if phase == "stock" else "datastates")
        train(job, run, where, told.send if rank == 0 else lambda run: None)
    dist.destroy_process_group()


def size_of(checkpoint: Path) -> int:
    """Bytes of all files so far."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
