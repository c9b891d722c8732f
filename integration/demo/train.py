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
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh

from dcp_datastates import CheckpointManager
from dcp_datastates.results import SaveHandle
from job import Job
from report import Run, Saved

ITERATIONS, RETAINED = int(os.environ.get("DEMO_ITERATIONS", "10")), 3


class Save:
    """A save in flight, timed on this rank. ``start`` starts it."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._began = time.perf_counter()
        handle = start()
        self._call = self._now()
        self._stats = handle.stats if isinstance(handle, SaveHandle) else None
        self._staged: Future[Any] | None = None
        self._gate = 0.0
        if isinstance(handle, AsyncSaveResponse):  # by a stager
            self._staged, self._future = handle.staging_completion, handle.upload_completion
        else:
            self._future = handle if self._stats is None else handle.committed
        self._commit: Future[float] = Future()
        self._future.add_done_callback(lambda _: self._commit.set_result(self._now()))

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def before_step(self) -> None:
        """Wait until the stager has copied all. This package's own step gate needs no call."""
        if self._staged is not None:
            began = self._now()
            self._staged.result()
            self._gate = self._now() - began

    def finish(self, path: Path) -> Saved:
        """Wait for the commit; collective, the same result everywhere."""
        waits = self._now()
        self._future.result()
        iteration = self._now()
        commit = self._commit.result()  # the callback may come just behind the result
        gate, write = self._gate, commit - self._call
        if self._stats is not None:
            gate, write = self._stats.gate_seconds, self._stats.total_seconds or 0.0
        parts = [self._call + gate, self._call, gate, iteration - waits, commit, iteration, write]
        slowest = 1e3 * torch.tensor(parts, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        *parts, write = slowest.tolist()
        return Saved(size_of(path), size_of(path) / write / 1e6, *parts)


class Stock:
    """Saves by ``dcp.async_save``; if ``staged``, in its best mode, as ``benchmarks`` measures it."""

    def __init__(self, job: Job, staged: bool) -> None:
        self._job = job
        self._group = dist.new_group(backend="gloo")  # not the group that trains
        # Without pinned memory, which needs a GPU, and without shared memory, which only another process needs.
        options = StagingOptions(False, False, True, False)
        self._stager = DefaultStager(options) if staged else None
        self._threads = 4 if staged else 1
        self._planner = dcp.DefaultSavePlanner(enable_plan_caching=staged)

    def save(self, path: Path) -> Any:
        model, optimizer = get_state_dict(self._job.model, self._job.optimizer)
        schedule = self._job.schedule.state_dict()
        return dcp.async_save(
            {"model": model, "optimizer": optimizer, "schedule": schedule},
            storage_writer=dcp.FileSystemWriter(path, thread_count=self._threads),
            planner=self._planner,
            process_group=self._group,
            async_stager=self._stager,
        )

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


def train(job: Job, run: Run, checkpoints: Path, tell: Callable[[Run], None]) -> None:
    """Save after every iteration; each save waits for the one before."""
    manager = CheckpointManager(checkpoints, every=1, keep=RETAINED, max_failures=1)
    state = {"model": job.model, "optimizer": job.optimizer, "schedule": job.schedule}
    stock = Stock(job, run.phase == "staged") if run.phase in ("stock", "staged") else None
    if run.phase == "resumed":
        run.resumed_from = manager.restore_latest(state) or 0
    save: Save | None = None
    job.optimizer.register_step_pre_hook(lambda *_: save.before_step() if save else None)
    for iteration in range(run.resumed_from + 1, ITERATIONS + 1):
        run.losses[iteration] = job.step(iteration)
        if save is not None:
            run.saves[iteration - 1] = save.finish(manager.path(iteration - 1))
        if stock is not None:
            shutil.rmtree(manager.path(iteration - RETAINED), ignore_errors=True)
            save = Save(partial(stock.save, manager.path(iteration)))
        else:
            save = Save(partial(manager.save, iteration, state))
        tell(run)
    assert save is not None
    run.saves[ITERATIONS] = save.finish(manager.path(ITERATIONS))
    tell(run)
    manager.close()
    if stock is not None:
        stock.close()


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
        where = root / ("datastates" if phase == "resumed" else phase)
        train(job, run, where, told.send if rank == 0 else lambda run: None)
    dist.destroy_process_group()


def size_of(checkpoint: Path) -> int:
    """Bytes of all files so far."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
