"""Who saves a job's state: nobody, stock's ``async_save`` with its stager, and this package."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import dcp_datastates
from dcp_datastates import DataStatesWriter


class Contender:
    """Saves a job's state; ``before_step`` is where torchtitan waits for staging.

    No save begins before the one before it is committed: ``DefaultStager`` stages into the very memory that is being
    written otherwise.
    """

    name = "no saving"

    def save(self, state: dict[str, Any], path: Path) -> Future[Any] | None:
        return None

    def captured(self) -> Future[Any]:
        """When the newest save has read all that it saves."""
        raise NotImplementedError

    def before_step(self) -> None:
        pass

    def close(self) -> None:
        pass


class StockPinned(Contender):
    name = "stock, DefaultStager, pinned"

    def __init__(self, on_gpu: bool) -> None:
        self.options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,  # for another process only; /dev/shm may be small
            use_async_staging=True,
            use_non_blocking_copy=on_gpu,
        )
        self.stager = DefaultStager(self.options)
        self.staging: Any = None

    def save(self, state: dict[str, Any], path: Path) -> Future[Any] | None:
        # These close it after each save: what it had pinned is gone.
        if torch.__version__ < (2, 13):
            self.stager = DefaultStager(self.options)
        response: Any = dcp.async_save(
            state,
            storage_writer=_stock_writer(path),
            async_stager=self.stager,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )
        self.staging = response.staging_completion
        return _future(response.upload_completion)

    def captured(self) -> Future[Any]:
        return _future(self.staging)

    def before_step(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None

    def close(self) -> None:
        self.stager.close()


class Ours(Contender):
    name = "DataStatesWriter"

    def __init__(self, cache: int | str, reads: str = "backward") -> None:
        self.writer = DataStatesWriter(host_cache_size=cache, reads=reads)

    def save(self, state: dict[str, Any], path: Path) -> Future[Any] | None:
        return dcp_datastates.async_save(state, path, writer=self.writer).upload_completion

    def captured(self) -> Future[Any]:
        return self.writer.captured

    def close(self) -> None:
        self.writer.close()


def _stock_writer(path: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(path, thread_count=4)


def _future(found: Any) -> Future[Any]:
    assert isinstance(found, Future)
    return found
