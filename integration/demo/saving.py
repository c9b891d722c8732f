"""Starting saves with either writer, and what each of them took."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageWriter

from checkpoints import retain, size_on_storage, step_path
from dcp_datastates import DataStatesWriter
from events import Phase, Saved

WriterName: TypeAlias = Literal["stock", "datastates"]

HOST_CACHE = "256MiB"
RETAINED = 3

_WRITERS: dict[WriterName, Callable[[Path], StorageWriter]] = {
    "stock": dcp.FileSystemWriter,
    "datastates": lambda path: DataStatesWriter(path, host_cache_size=HOST_CACHE),
}


class Save:
    """One save in flight, timed on this rank."""

    def __init__(
        self, writer: StorageWriter, state: dict[str, Any], group: dist.ProcessGroup
    ) -> None:
        self._writer = writer
        self._committed = 0.0
        self._called = time.perf_counter()
        self._future: Future[Any] = dcp.async_save(
            state, storage_writer=writer, process_group=group
        )
        self._returned = time.perf_counter()
        self._future.add_done_callback(self._note_commit)

    def _note_commit(self, _: Future[Any]) -> None:
        self._committed = time.perf_counter()

    def finish(self) -> list[float]:
        """Wait for the commit; seconds in the call, the gate, this wait, until the commit, writing."""
        before = time.perf_counter()
        self._future.result()
        wait = time.perf_counter() - before
        while not self._committed:  # result() may return just before the callback runs
            time.sleep(1e-4)
        gate, write = 0.0, self._committed - self._returned
        if isinstance(self._writer, DataStatesWriter):
            statistics = self._writer.last_save
            assert statistics is not None
            gate, write = statistics.gate_seconds, statistics.total_seconds or 0.0
            self._writer.close()
        return [
            self._returned - self._called,
            gate,
            wait,
            self._committed - self._called,
            write,
        ]


class Saver:
    """Saves every iteration into a directory of its own; at most one save is in flight."""

    def __init__(
        self, root: Path, writer: WriterName, phase: Phase, group: dist.ProcessGroup
    ) -> None:
        self._root = root
        self._writer = writer
        self._phase: Phase = phase
        self._group = group
        self._in_flight: tuple[int, Save] | None = None

    def start(self, iteration: int, state: dict[str, Any]) -> None:
        """Start the save; the one before must have been finished."""
        assert self._in_flight is None
        writer = _WRITERS[self._writer](step_path(self._root, iteration))
        self._in_flight = iteration, Save(writer, state, self._group)

    def finish(self) -> Saved | None:
        """Wait for the save in flight (None: there is none); collective, the same result everywhere."""
        if self._in_flight is None:
            return None
        iteration, save = self._in_flight
        self._in_flight = None
        seconds = torch.tensor(save.finish(), dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        call, gate, wait, commit, write = seconds.tolist()
        nbytes = 0
        if dist.get_rank() == 0:
            nbytes = size_on_storage(step_path(self._root, iteration))
            retain(self._root, RETAINED)
        return Saved(self._phase, iteration, call, gate, wait, commit, write, nbytes)
