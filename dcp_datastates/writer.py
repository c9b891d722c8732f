"""The storage writer: what DCP calls, and in which order, for one save after another.

A synchronous save and DCP's half of an asynchronous one make the same calls, in one thread::

    [reset]  storage_meta  set_up_storage_writer  prepare_local_plan  [prepare_global_plan]
    write_data  [finish]                                         [coordinator only, or if an id is given]

An asynchronous save calls ``stage`` before, in the training thread. Nothing about a save is kept on the
writer, which may serve several at once: it is kept in a :class:`_Save`, found by the calling thread.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from dcp_datastates import step_gate
from dcp_datastates._native import Window
from dcp_datastates.attempt import Attempt, AttemptTicket, collect_ticket, next_attempt
from dcp_datastates.buffers import EagerBuffers
from dcp_datastates.capture import capture
from dcp_datastates.commit import commit
from dcp_datastates.config import WriterConfig
from dcp_datastates.engine import engine, next_order
from dcp_datastates.errors import (
    CheckpointExistsError,
    ConfigurationError,
    DataStatesError,
    SaveAbandonedError,
)
from dcp_datastates.ownership import Ownership, known_optimizers
from dcp_datastates.snapshot import Snapshot
from dcp_datastates.staged import StagedStateDict
from dcp_datastates.stats import SaveStats
from dcp_datastates.storage import local
from dcp_datastates.turns import Turn, at_thread_end, await_all
from dcp_datastates.write import write_plan

__all__ = ["DataStatesWriter"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Save:
    """One save on this rank, from its first call to its last."""

    path: Path | None
    stats: SaveStats
    snapshot: Snapshot | None = None
    turn: Turn | None = None
    order: int = 0
    rank: int = 0
    attempt: Attempt | None = None
    error: DataStatesError | None = None

    def deliver(self, attempt: Attempt) -> None:
        """Take the coordinator's choice; the newest counts, see :class:`AttemptTicket`."""
        if self.attempt is None or attempt > self.attempt:
            self.attempt = attempt

    def directory(self) -> Path:
        if self.path is None:
            raise ConfigurationError(
                "no path to save to: construct DataStatesWriter(path), or pass checkpoint_id"
            )
        return self.path

    def ended(self) -> None:
        """DCP's thread is gone, or DCP is done with this save in it."""
        if self.snapshot is not None:
            self.snapshot.fail(
                SaveAbandonedError("DCP ended this save before its data were written")
            )
        if self.turn is not None:
            self.turn.end()


class _ThisThread(threading.local):
    """What DCP has told a writer so far in the calling thread."""

    path: Path | None = None
    staged: _Save | None = None
    save: _Save | None = None


class DataStatesWriter(StorageWriter, AsyncStager):
    """Saves through a native pipeline; ``dcp.async_save`` returns before tensors are read.

    Pass it as ``storage_writer=`` to :func:`torch.distributed.checkpoint.save` or ``async_save``, with
    any planner. Construct one per save, or one for all and pass ``checkpoint_id``.

    In ``async_save``, tensors that an optimizer owns (its parameters and state, from 64 KiB up) are
    *deferred*: read while the next forward and backward run, and held back from the next
    ``optimizer.step()`` by a gate until they have been read. Everything else is copied at the call.
    What is committed is what the state was at the call; if that cannot be guaranteed, the save fails with
    :class:`SnapshotTornError` and nothing is committed.

    Args:
        path: Directory of the checkpoint; created if missing. None if every save passes
            ``checkpoint_id``.
        host_cache_size: Host memory for staging, bytes or a string such as ``"4GiB"``; at least 32 MiB.
            Memory is taken as it is used, and shared by all writers of the process: the largest size
            asked for counts. A checkpoint may be larger: then its reads wait for storage.
        read_window: When deferred reads start: ``"backward"``, with the next backward pass;
            ``"immediate"``, at the call.
        read_deadline: Seconds after the call at which they start in any case (0 to 3600).
        defer: ``"owned"``, as above; ``"all"``, the caller vouches that no tensor changes before
            :attr:`captured` other than by an optimizer's ``step()``; ``"none"``, copy all at the call.
        overwrite: Whether a save may replace a committed checkpoint at the path. The old one
            loads until the new one is committed, whatever happens.

    Raises:
        ConfigurationError: an option has a value that cannot work, or ``path`` is a file.
        StorageError: there is no permission to create the checkpoint.

    Threads: one thread saves at a time, as DCP does it; :attr:`captured`, :meth:`wait` and
    :meth:`close` may be called from any.
    """

    _synchronize_after_execute = False  # async_save must not wait for the reads

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        host_cache_size: int | str = "4GiB",
        read_window: str = "backward",
        read_deadline: float = 1.0,
        defer: str = "owned",
        overwrite: bool = True,
    ) -> None:
        super().__init__()
        self._config = WriterConfig.checked(
            host_cache_size=host_cache_size,
            read_window=read_window,
            read_deadline=read_deadline,
            defer=defer,
            overwrite=overwrite,
        )
        self._path = None if path is None else self._checked(path)
        self._here = _ThisThread()
        self._lock = threading.Lock()  # guards _in_flight, _captured, _last, _closed
        self._in_flight: list[_Save] = []
        self._captured: Future[None] | None = None
        self._last: SaveStats | None = None
        self._closed = False
        engine(self._config.host_cache_bytes)

    # ---- for the user --------------------------------------------------------------------------

    @property
    def captured(self) -> Future[None]:
        """Of the newest ``async_save``: done when all is read and the state may be changed freely.

        Raises from ``result()`` what the save failed with until then. Done already if there was none.
        """
        with self._lock:
            if self._captured is None:
                self._captured = Future()
                self._captured.set_result(None)
            return self._captured

    @property
    def last_save(self) -> SaveStats | None:
        """What the newest save whose files are durable cost on this rank; None before the first."""
        return self._last

    def wait(self) -> None:
        """Block until DCP is done with every asynchronous save of this writer; starts their reads now.

        Does not raise for a failed save: its future does.
        """
        step_gate.open_windows()
        with self._lock:
            in_flight = list(self._in_flight)
        for save in in_flight:
            if save.turn is not None:
                save.turn.join()

    def close(self) -> None:
        """:meth:`wait`, then refuse further saves. Idempotent. The shared engine lives on."""
        self.wait()
        with self._lock:
            self._closed = True

    # ---- AsyncStager ---------------------------------------------------------------------------

    def stage(self, state_dict: Mapping[str, Any]) -> Any:
        """Capture ``state_dict``: copy what must be copied, arm the gate and the read window, return.

        Called by ``dcp.async_save`` in the training thread. Raises :class:`UnsupportedTensorError`,
        :class:`ConfigurationError` or :class:`CheckpointExistsError`; then nothing was started.
        """
        began = time.perf_counter()
        self._check_open()
        if self._path is not None:
            self._check_overwrite(self._path)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            raise ConfigurationError(
                "async_save was called while a CUDA graph is being captured; call it outside"
            )
        config = self._config
        native = engine(config.host_cache_bytes)
        order = next_order()
        ownership = Ownership(known_optimizers() if config.defer != "none" else ())
        immediate = config.read_window == "immediate"
        window = Window(0.0 if immediate else config.read_deadline)
        stats = SaveStats()
        snapshot = Snapshot(ownership, window, order, stats)
        buffers = EagerBuffers(native, order)
        try:
            captured = capture(state_dict, ownership, config.defer, native, buffers.allocate)
        except BaseException:
            buffers.release()
            raise
        save = _Save(self._path, stats, snapshot, Turn(), order)
        stats.eager_bytes = captured.eager_bytes
        stats.deferred_bytes = sum(captured.deferred.sizes)
        try:
            snapshot.hold(captured, buffers.slab)
            if not immediate and captured.deferred.sizes:
                step_gate.arm_backward()
        except BaseException:
            save.ended()  # or the saves behind it would wait for its turn
            raise
        with self._lock:
            self._in_flight = [other for other in self._in_flight if not _is_over(other)]
            self._in_flight.append(save)
            self._captured = snapshot.captured

        def begin() -> dict[Any, Any]:
            self._here.staged = save
            at_thread_end(save.ended)
            assert save.turn is not None
            save.turn.wait()
            try:
                return snapshot.begin()
            except DataStatesError as error:
                # Raised from storage_meta(), where DCP tells the other ranks; here they would wait.
                save.error = error
                return {}

        def abandon(error: BaseException) -> None:
            snapshot.fail(error)
            save.ended()

        stats.stage_seconds = time.perf_counter() - began
        return StagedStateDict(begin, abandon)

    def synchronize_staging(self) -> None:
        """Block until :attr:`captured` is done; raises what it raises."""
        step_gate.open_windows()
        self.captured.result()

    # ---- StorageWriter, in the order of DCP's calls ----------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer can save to ``checkpoint_id``: any path without a URL scheme."""
        try:
            local.local_path(checkpoint_id)
        except ConfigurationError:
            return False
        return True

    @property
    def checkpoint_id(self) -> str:
        """The path, for DCP's logs."""
        return "" if self._path is None else str(self._path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The save that begins in this thread goes to ``checkpoint_id``."""
        self._here.path = None if checkpoint_id is None else self._checked(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """DCP's first call for a save, in the thread that runs it."""
        save = self._begin()
        return StorageMeta(checkpoint_id=str(save.directory()))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this save's rank. ``use_collectives=False`` is refused: nothing could be committed."""
        save = self._here.save or self._begin()
        save.rank = int(kwargs.get("rank") or 0)
        if not kwargs.get("use_collectives", True):
            raise ConfigurationError(
                "use_collectives=False is not supported: a checkpoint is committed once, for all ranks; "
                "leave it True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory and see that it may be written to."""
        directory = self._save().directory()
        self._check_overwrite(directory)
        local.make_directories(directory)
        local.check_writable(directory)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: choose the attempt, which travels to the ranks with their plans."""
        save = self._save()
        attempt = next_attempt(local.attempts(save.directory()))
        save.deliver(attempt)
        return [dataclasses.replace(plan, storage_data=AttemptTicket(attempt)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's part of the plan; returns when it is on stable storage.

        Raises :class:`SnapshotTornError`, :class:`UnsupportedTensorError`, :class:`StorageError`, or
        what the planner's ``resolve_data`` raises; then this rank's files are removed.
        """
        save = self._save()
        if isinstance(plan.storage_data, AttemptTicket):
            save.deliver(plan.storage_data.attempt)
        if save.attempt is None:
            raise DataStatesError(
                "the plan carries no attempt: prepare_global_plan was not called, or its plans not used"
            )
        try:
            results = write_plan(
                plan,
                planner,
                engine(self._config.host_cache_bytes),
                save.directory(),
                save.attempt,
                save.rank,
                save.order,
                save.snapshot,
                save.stats,
            )
        except BaseException as error:
            if save.snapshot is not None:
                save.snapshot.fail(error)
            raise
        with self._lock:
            self._last = save.stats
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result(results)
        self._over_unless_dcp_thread(save)
        return future

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Coordinator: every rank's bytes are durable; commit."""
        save = self._save()
        assert save.attempt is not None
        directory = save.directory()
        self._check_overwrite(directory)
        meta = StorageMeta(checkpoint_id=str(directory), save_id=save.attempt.name)
        commit(directory, save.attempt, metadata, meta, results)

    # ---- within ------------------------------------------------------------------------------------

    def _begin(self) -> _Save:
        """A save begins in this thread: the one whose staged state DCP has just looked at, or a new one."""
        here = self._here
        staged, here.staged = here.staged, None
        path, here.path = here.path, None
        if staged is not None:
            save = staged
            save.path = path or save.path
        else:
            self._check_open()
            step_gate.open_windows()  # no backward pass comes while this thread waits here
            await_all()
            save = _Save(path or self._path, SaveStats(), order=next_order())
        here.save = save
        collect_ticket(save.deliver)
        if save.error is not None:
            raise save.error
        return save

    def _save(self) -> _Save:
        save = self._here.save
        if save is None:
            raise DataStatesError(
                "no save has begun in this thread: DCP calls storage_meta() and set_up_storage_writer() first"
            )
        return save

    def _over_unless_dcp_thread(self, save: _Save) -> None:
        # DCP's own thread ends with its save, and that ends the turn. In a thread of somebody else's,
        # which may live on, nothing tells of the end: the turn ends here.
        if save.turn is not None and not threading.current_thread().name.startswith(
            "AsyncCheckpointExecutor"
        ):
            save.turn.end()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError("this DataStatesWriter is closed; construct another one")

    def _check_overwrite(self, directory: Path) -> None:
        if not self._config.overwrite and (directory / local.METADATA_NAME).exists():
            raise CheckpointExistsError(
                f"a committed checkpoint is at {str(directory)!r} and overwrite=False; "
                f"pass overwrite=True to replace it, or another path"
            )

    @staticmethod
    def _checked(path: str | os.PathLike[str]) -> Path:
        directory = local.local_path(path)
        local.check_writable(directory)
        return directory

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a DataStatesWriter cannot be sent to another process: AsyncCheckpointerType.PROCESS is not "
            "supported, use AsyncCheckpointerType.THREAD (the default)"
        )


def _is_over(save: _Save) -> bool:
    return save.turn is None or save.turn.ended
