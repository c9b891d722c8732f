"""The writers that are compared, each behind one way to start a save and to wait for it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_datastates import DataStatesWriter


class Save:
    """One save in flight."""

    def __init__(self, called: float, committed: Future[Any]) -> None:
        self.called = called
        self.returned = time.perf_counter()
        self._future = committed
        self._ended = 0.0
        committed.add_done_callback(self._note_end)

    def _note_end(self, _: Future[Any]) -> None:
        self._ended = time.perf_counter()

    def before_step(self) -> float:
        """Wait until ``optimizer.step()`` may be called; seconds waited."""
        return 0.0

    def commit_seconds(self) -> float:
        """Wait for the commit; seconds from the call to it."""
        self._future.result()
        while not self._ended:  # result() may return just before the callback runs
            time.sleep(1e-4)
        return self._ended - self.called

    def gate_seconds(self) -> float:
        """Once, after the commit: seconds that ``optimizer.step()`` itself waited for the save."""
        return 0.0


class Contender(ABC):
    """A writer with its options."""

    name: str

    @abstractmethod
    def save(self, state: dict[str, Any], path: Path, *, training: bool) -> Save:
        """Start a save. ``training``: iterations go on (not: the program only waits)."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Give up what is kept between saves."""


class Stock(Contender):
    """``FileSystemWriter``, which stages a copy inside ``async_save``."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.name = f"FileSystemWriter, {threads} thread{'s' if threads > 1 else ''}"

    def save(self, state: dict[str, Any], path: Path, *, training: bool) -> Save:
        called = time.perf_counter()
        writer = dcp.FileSystemWriter(path, thread_count=self._threads)
        future = dcp.async_save(state, storage_writer=writer)
        assert isinstance(future, Future)
        return Save(called, future)


class StagedSave(Save):
    """A save whose staging is itself in the background; the training loop has to wait for it."""

    def __init__(self, called: float, response: AsyncSaveResponse) -> None:
        super().__init__(called, response.upload_completion)
        self._staged = response.staging_completion

    def before_step(self) -> float:
        begun = time.perf_counter()
        self._staged.result()
        return time.perf_counter() - begun


class StockStager(Contender):
    """``DefaultStager`` kept between saves: it copies in a thread, into memory that it reuses.

    Pinned and non-blocking copies need an accelerator. Of what runs on a CPU, staging in the
    background is on, as it takes less of the training thread; shared memory, which changes little, is off.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.name = f"DefaultStager + FileSystemWriter, {threads} threads"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )

    def save(self, state: dict[str, Any], path: Path, *, training: bool) -> Save:
        called = time.perf_counter()
        writer = dcp.FileSystemWriter(path, thread_count=self._threads)
        response = dcp.async_save(state, storage_writer=writer, async_stager=self._stager)
        assert isinstance(response, AsyncSaveResponse)
        return StagedSave(called, response)

    def close(self) -> None:
        self._stager.close()


class DataStatesSave(Save):
    def __init__(self, called: float, committed: Future[Any], writer: DataStatesWriter) -> None:
        super().__init__(called, committed)
        self._writer = writer

    def gate_seconds(self) -> float:
        statistics = self._writer.last_save
        assert statistics is not None
        self._writer.close()
        return statistics.gate_seconds


class DataStates(Contender):
    """This project's writer, one per save; host cache and threads belong to the process."""

    def __init__(self, host_cache_bytes: int) -> None:
        self.name = f"DataStatesWriter, {host_cache_bytes >> 20} MiB cache"
        self._host_cache_bytes = host_cache_bytes

    def save(self, state: dict[str, Any], path: Path, *, training: bool) -> Save:
        called = time.perf_counter()
        writer = DataStatesWriter(
            path,
            host_cache_size=self._host_cache_bytes,
            read_window="backward" if training else "immediate",
        )
        future = dcp.async_save(state, storage_writer=writer)
        return DataStatesSave(called, future, writer)
