"""The storage writer: what DCP calls, and in which order, for one save after another.

A synchronous save and DCP's half of an asynchronous one make the same calls, in one thread::

    [reset]  storage_meta  set_up_storage_writer  prepare_local_plan  [prepare_global_plan]
    write_data  [finish]                                         [coordinator only, or if an id is given]

An asynchronous save calls ``stage`` before, in the training thread. Nothing about a save is kept on the
writer, which may serve several at once: it is kept in a :class:`~dcp_datastates.saving.operation.Save`, found by the
calling thread.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from dcp_datastates._native import Window
from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.groups import commit_group
from dcp_datastates.commit.publish import check_overwrite
from dcp_datastates.commit.rank_set import ALONE, RankSet, rank_set_of
from dcp_datastates.commit.round import FailedPart
from dcp_datastates.config import WriterConfig
from dcp_datastates.dcp.awaited import is_awaited, work_item_here
from dcp_datastates.dcp.compat import StagedStateDict, bind, end_here, warn_if_shared
from dcp_datastates.dcp.planner import DataStatesSavePlanner, is_unchanged
from dcp_datastates.errors import ConfigurationError, DataStatesError
from dcp_datastates.io.devices import capturing
from dcp_datastates.io.engine import engine, moved, next_order
from dcp_datastates.planning.exchange import Session, SessionMeta
from dcp_datastates.planning.plan_cache import PlannedMetadata
from dcp_datastates.planning.rank_memory import Share
from dcp_datastates.process.forks import ProcessLock
from dcp_datastates.process.futures import AskedFuture
from dcp_datastates.process.waiting import Stall
from dcp_datastates.saving.admission import enter, make_room
from dcp_datastates.saving.operation import Save
from dcp_datastates.saving.turns import Turn, await_all
from dcp_datastates.saving.write import Ahead, read_ahead, write_plan
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.buffers import EagerBuffers
from dcp_datastates.staging.deferred_reads import DeferredReads
from dcp_datastates.staging.ownership import Ownership, known_optimizers
from dcp_datastates.staging.stage import StagedState, stage_state
from dcp_datastates.stats import SaveStats
from dcp_datastates.storage import local
from dcp_datastates.storage.attempt import TicketCarrier, collect_ticket
from dcp_datastates.storage.failpoints import hit

__all__ = ["DataStatesWriter"]

logger = logging.getLogger(__name__)

_INTRODUCE_SECONDS: Final = 1.0


class _ThisThread(threading.local):
    """What DCP has told a writer so far in the calling thread."""

    path: str | os.PathLike[str] | None = None
    staged: Save | None = None
    save: Save | None = None


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
        path: Directory of the checkpoint; created if missing. ``~`` is the home directory. A relative path is below
            the working directory now (``checkpoint_id``: at the call of the save), and symbolic links are followed
            once for each save. None if every save passes ``checkpoint_id``.
        host_cache_size: Host memory for staging, bytes or a string such as ``"4GiB"``; at least 32 MiB.
            ``"auto"`` is 4 GiB, or less where the ranks of a machine would take more than a quarter of the
            memory that they may use (physical, or by the limit of a cgroup). Memory is taken as it is used,
            and shared by all writers of the process: the largest size asked for counts. A checkpoint may be larger:
            then its reads wait for storage.
        read_window: When deferred reads start: ``"backward"``, with the next backward pass;
            ``"immediate"``, at the call.
        read_deadline: Seconds after the call at which they start in any case (0 to 3600).
        defer: ``"owned"``, as above; ``"all"``, the caller vouches that no tensor changes before
            :attr:`captured` other than by an optimizer's ``step()``; ``"none"``, copy all at the call.
        overwrite: Whether a save may replace a committed checkpoint at the path. The old one
            loads until the new one is committed, whatever happens.
        process_group: The ranks that save together, if they are not all: the group that is passed to
            DCP. Only its membership is used, no collective runs on it.
        no_dist: This process saves alone, whatever others do: as DCP's option of that name.
        commit: ``"wait"``: DCP's future returns when the checkpoint is committed on all ranks.
            ``"background"``: it returns as soon as the bytes are read and handed over, so that DCP's
            bookkeeping of the next save can begin; :attr:`committed` and :meth:`wait` tell the outcome. A synchronous
            save always waits.
        commit_timeout: Seconds without any progress after which a rank that is alive fails the save: one that has not
            called ``async_save``, say. A rank that is dead, or silent for 15 s, fails it in any case.
        exit_timeout: Seconds for which the end of the process waits for saves in flight. Those not committed by
            then fail, and the log names them.
        max_in_flight: Asynchronous saves of this process that may be under way before one is behind.
        when_behind: What ``async_save`` does then: ``"wait"`` for the oldest; ``"skip"`` this save;
            drop the oldest that has not begun, for the ``"newest"``. The ranks agree on the last two,
            and the future of a save that is left out raises :class:`CheckpointSkipped`. (:attr:`committed` of a save
            that DCP runs does so on the ranks that were behind; on others it raises :class:`SaveAbandonedError`.)

    Raises:
        ConfigurationError: an option has a value that cannot work, or ``path`` is a file.
        StorageError: there is no permission to create the checkpoint. (These two about ``path`` if there is
            one rank; else the save raises them, on all ranks.)

    Threads: one thread saves at a time, as DCP does it; :attr:`captured`, :meth:`wait` and
    :meth:`close` may be called from any.
    """

    _synchronize_after_execute = False  # async_save must not wait for the reads
    _used = False
    _closed = False
    _made_for: CommitGroup | None = None

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        host_cache_size: int | str = "auto",
        read_window: str = "backward",
        read_deadline: float = 1.0,
        defer: str = "owned",
        overwrite: bool = True,
        process_group: Any = None,
        commit: str = "wait",
        commit_timeout: float = 300.0,
        exit_timeout: float = 600.0,
        max_in_flight: int = 4,
        when_behind: str = "wait",
        no_dist: bool = False,
    ) -> None:
        super().__init__()
        self._config = WriterConfig.checked(
            host_cache_size=host_cache_size,
            read_window=read_window,
            read_deadline=read_deadline,
            defer=defer,
            overwrite=overwrite,
            commit=commit,
            commit_timeout=commit_timeout,
            exit_timeout=exit_timeout,
            max_in_flight=max_in_flight,
            when_behind=when_behind,
        )
        self._process_group = process_group
        self._no_dist = no_dist
        # Where there are several ranks, only some may find it so: prepare_local_plan() tells them all.
        self._alone = self.rank_set is ALONE  # raises if this process is not among them
        self._path = None if path is None else self._checked(path)
        self._here = _ThisThread()
        self._lock = ProcessLock()  # guards _saves, _newest, _last, _closed
        self._saves: list[Save] = []  # whose outcome is not known, or was not asked for
        self._newest: Save | None = None
        self._last: SaveStats | None = None
        self._closed = False
        engine(self._config.host_cache_bytes)
        self._made_for = commit_group(self.rank_set)
        if self._made_for.detector is not None:
            # Once: from then on the other ranks see at once if this process dies. The detector's thread does it.
            self._made_for.detector.introduce(_INTRODUCE_SECONDS)

    def __del__(self) -> None:
        # DCP calls a Stateful's state_dict() before it comes here. If that raises, all that is seen of the call is a
        # writer that was made for it, and is dropped without having saved anything.
        if self._made_for is not None and not self._used and not self._closed:
            self._made_for.miss()

    # ---- for the user --------------------------------------------------------------------------

    @property
    def captured(self) -> Future[None]:
        """Of the newest ``async_save``: done when all is read and the state may be changed freely.

        Raises from ``result()`` what the save failed with until then. Done already if there was none.
        """
        with self._lock:
            newest = self._newest
        return _done() if newest is None or newest.reads is None else newest.reads.captured

    @property
    def committed(self) -> Future[None]:
        """Of the newest save: done when it is committed on all ranks, or has failed.

        This is authoritative: a future of DCP's that raised may have lost its coordinator after the
        commit. Raises from ``result()`` this package's error that failed the save, with the rank's
        number, or :class:`CommitOutcomeUnknown`. Done already if there was none. Callbacks run in the commit
        thread, and must not wait for another save.
        """
        with self._lock:
            newest = self._newest
        return _done() if newest is None else newest.committed

    @property
    def last_save(self) -> SaveStats | None:
        """What the newest save that was handed over cost on this rank; None before the first."""
        return self._last

    def wait(self) -> None:
        """Block until the outcome of every save of this writer is known; starts their reads now.

        With ``commit="background"``, raises what a save failed with, if its outcome was not asked for.
        """
        step_gate.open_windows()
        end_here(asynchronous=False)
        with self._lock:
            saves = list(self._saves)
        for save in saves:
            save.wait()
        with self._lock:
            self._saves = [save for save in self._saves if save not in saves]
        for save in saves:
            if save.background and not save.committed.asked:
                save.committed.result()

    def close(self) -> None:
        """:meth:`wait`, then refuse further saves. Idempotent. The shared engine lives on."""
        try:
            self.wait()
        finally:
            with self._lock:
                self._closed = True

    # ---- AsyncStager ---------------------------------------------------------------------------

    def stage(self, state_dict: Mapping[str, Any]) -> Any:
        """StagedState ``state_dict``: copy what must be copied, arm the gate and the read window, return.

        Called by ``dcp.async_save`` in the training thread. Raises :class:`ConfigurationError`. What
        may go wrong on one rank alone (:class:`UnsupportedTensorError`, :class:`CheckpointExistsError`,
        :class:`StorageError`) is raised here if there is one rank; else by the future, on all ranks.
        """
        if not self._no_dist:
            warn_if_shared()
        save = self.call(state_dict, None, self._path, own=False)
        caller = threading.get_ident()

        def begin() -> dict[Any, Any]:
            self._here.staged = save
            work = work_item_here()
            bind(save, work)
            save.in_callers_thread = threading.get_ident() == caller
            return self.begin(save, None, work)

        def abandon(error: BaseException) -> None:
            assert save.reads is not None
            save.reads.fail(error)
            save.error = error
            save.ended()

        return StagedStateDict(begin, abandon)

    def call(
        self,
        state_dict: Mapping[str, Any],
        planner: SavePlanner | None,
        path: Path | None,
        *,
        own: bool,
    ) -> Save:
        """What a call of ``async_save`` does in the training thread: as :meth:`stage`, without what is DCP's.

        Args:
            state_dict: what to save.
            planner: what will plan it, if that knows this writer.
            path: where to; None if DCP will say.
            own: whether this package runs the save, and not DCP.
        """
        began = time.perf_counter()
        config = self._config
        self._check_open()
        if capturing():
            raise ConfigurationError(
                "async_save was called while a CUDA graph is being captured; call it outside"
            )
        end_here()
        self._used = True
        group = commit_group(self.rank_set)
        left_out = make_room(config.max_in_flight, config.when_behind)
        stats = SaveStats()
        save = self._make_save(group, path, stats, asynchronous=True, own=own)
        save.reads = self._deferred_reads(save)
        save.working_directory = local.working_directory()
        if left_out:
            save.leave_out(left_out)
        try:
            hit("staged.before")
            if not left_out:
                self._stage(save, save.reads, state_dict)
            hit("staged.after")
        except BaseException as error:
            save.error = error
            save.reads.fail(error)
            if group.rank_set.world == 1 or not isinstance(error, Exception):
                raise
        if save.error is None and (not own or _is_ours(planner)):
            # On DCP's own way, the planner is not known yet, and DCP has the state itself.
            state = save.reads.state if own else None
            save.session = _session(group, save.reads.staged, state)
            # Now: the tensors may have other forms by the time that they are planned.
            save.session.look()
        save.turn = Turn(expected=not own)
        with self._lock:
            self._newest = save
            self._saves = [other for other in self._saves if not _is_told(other)]
            self._saves.append(save)
        enter(save)
        stats.stage_seconds = time.perf_counter() - began
        return save

    def begin(self, save: Save, planner: SavePlanner | None, work: Any = None) -> dict[Any, Any]:
        """The calling thread plans ``save``: returns its state when its turn has come.

        What goes wrong is in ``save.error``, and raised from :meth:`storage_meta`: there it is told to the other ranks,
        and here they would wait. ``work`` is the future of what DCP has the thread do.
        """
        assert save.turn is not None
        assert save.reads is not None
        save.turn.come(work)
        try:
            if save.error is None:
                save.reads.begin(lambda: is_awaited(work))
                if save.own and save.session is not None and self._config.when_behind == "wait":
                    # Before this save's turn, so that its reads wait for no other's bookkeeping. Here, and
                    # not in the training thread, which has better things to do.
                    save.ahead = self._read_ahead(save, save.session, planner)
        except Exception as error:
            save.error = save.error or error
        save.turn.wait()
        try:
            save.begin()
            # A planner that knows this writer asks the session for the state, and mostly need not.
            given_by_session = save.own and save.session is not None
            return {} if save.error is not None or given_by_session else save.reads.state()
        except Exception as error:
            save.error = save.error or error
            return {}
        finally:
            if save.error is not None:
                save.reads.fail(save.error)  # its memory is free at once

    def run(self, save: Save) -> None:
        """The calling thread makes DCP's calls for ``save`` from now on."""
        self._here.staged = save

    def _read_ahead(
        self, save: Save, session: Session, planner: SavePlanner | None
    ) -> Ahead | None:
        assert isinstance(planner, DataStatesSavePlanner)
        assert save.reads is not None
        native = engine(self._config.host_cache_bytes)
        try:
            return read_ahead(planner, native, save.order, save.reads, save.progress, session)
        except DataStatesError:
            raise
        except Exception:  # then it is read when it is planned
            logger.exception("could not read ahead")
            save.reads.discard()
            return None

    def _deferred_reads(self, save: Save) -> DeferredReads:
        config = self._config
        ownership = Ownership(known_optimizers())  # with defer="none", the planner asks
        window = Window(0.0 if config.read_window == "immediate" else config.read_deadline)
        return DeferredReads(ownership, window, save.order, save.stats, config.commit_timeout)

    def _stage(self, save: Save, reads: DeferredReads, state_dict: Mapping[str, Any]) -> None:
        config = self._config
        if save.path is not None:
            check_overwrite(save.path, config.overwrite)
        native = engine(config.host_cache_bytes)
        buffers = EagerBuffers(native, save.order)
        try:
            staged = stage_state(
                state_dict, reads.ownership, config.defer, native, buffers.allocate
            )
        except BaseException:
            buffers.release()
            raise
        save.stats.eager_bytes = staged.eager_bytes
        save.stats.deferred_bytes = sum(staged.deferred.sizes)
        reads.hold(staged, buffers.slab)
        if config.read_window != "immediate" and staged.deferred.sizes:
            step_gate.arm_backward()

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
        """The save that begins in this thread goes to ``checkpoint_id``.

        DCP calls this in its own thread. A relative path is below the working directory at the call of
        ``async_save``.
        """
        self._here.path = checkpoint_id

    def storage_meta(self) -> StorageMeta:
        """DCP's first call for a save, in the thread that runs it."""
        save = self._begin()
        meta = SessionMeta(checkpoint_id=str(save.directory()))
        if save.session is None and save.reads is None:  # synchronous: DCP has the state itself
            save.session = _session(save.group, None, None)
        meta.session = save.session
        return meta

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this save's rank. ``use_collectives=False`` is refused: nothing could be committed."""
        save = self._here.save or self._begin()
        save.rank = int(kwargs.get("rank") or 0)
        save.is_coordinator = is_coordinator
        if not kwargs.get("use_collectives", True):
            raise ConfigurationError(
                "use_collectives=False is not supported: a checkpoint is committed once, for all ranks; "
                "leave it True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See that the checkpoint may be written."""
        hit("plan.before")
        directory = self._save().place()
        check_overwrite(directory, self._config.overwrite)
        local.check_writable(directory)
        hit("plan.after")
        reads = self._save().reads
        if reads is None:
            return plan
        return dataclasses.replace(plan, items=reads.staged.as_captured(plan.items))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: claim an attempt; the ticket travels to the ranks with their plans."""
        carrier = TicketCarrier(self._save().claim(len(plans)))
        return [dataclasses.replace(plan, storage_data=carrier) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's part of the plan; returns when all of it is read, and was whole.

        The files become durable behind it, and the commit group waits for that. Raises
        :class:`SnapshotTornError`, :class:`UnsupportedTensorError`, :class:`StorageError`, or what the
        planner's ``resolve_data`` raises; then this save fails on all ranks.
        """
        save = self._save()
        try:
            if isinstance(plan.storage_data, TicketCarrier):
                save.deliver(plan.storage_data.ticket)
            ticket = save.ticket()
            if save.own and save.session is not None and not save.session.taken:
                raise ConfigurationError(
                    "set_up_planner() of the planner was replaced after async_save was called, by a function that "
                    "takes no storage_meta or calls no super().set_up_planner(); set hooks before the call"
                )
            share = None
            if save.session is not None and isinstance(planner, DataStatesSavePlanner):
                share = planner.share_of(save.session)
            results, part = write_plan(
                plan,
                planner,
                engine(self._config.host_cache_bytes),
                save.place(),
                ticket.attempt,
                save.rank,
                save.order,
                save.reads,
                save.stats,
                save.progress,
                save.session,
                share,
                save.ahead,
            )
        except BaseException as error:
            if save.reads is not None:
                save.reads.fail(error)
            save.submit(FailedPart(error))
            self._over_unless_its_thread_tells(save)
            raise
        finally:
            save.ahead = None
            if save.session is not None and isinstance(planner, DataStatesSavePlanner):
                planner.release(save.session)
        if share is not None:
            _note_told(save, share, results[0].digest)
        save.submit(part)
        with self._lock:
            self._last = save.stats
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result(results)
        if not save.is_coordinator:
            self._over_unless_its_thread_tells(save)
        return future

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Coordinator: DCP has all ranks' results. Returns when committed, or raises why not.

        With ``commit="background"`` and an asynchronous save, returns at once.
        """
        save = self._save()
        try:
            if isinstance(metadata, PlannedMetadata):
                metadata.consolidate(results, str(save.place()), save.ticket().attempt.name)
            save.consolidate(metadata, results)
        except BaseException as error:
            save.abandon(error)
            raise
        finally:
            self._over_unless_its_thread_tells(save)

    # ---- for this package's async_save ---------------------------------------------------------------

    @property
    def rank_set(self) -> RankSet:
        """The ranks that commit together."""
        return ALONE if self._no_dist else rank_set_of(self._process_group)

    def path_of(self, path: str | os.PathLike[str] | None) -> Path:
        """Where a call with this ``path`` saves to. Raises :class:`ConfigurationError` if nothing says."""
        if path is not None:
            return self._checked(path)
        if self._path is None:
            raise ConfigurationError("no path to save to: pass path, or a writer that has one")
        return self._path

    # ---- within ------------------------------------------------------------------------------------

    def _make_save(
        self,
        group: CommitGroup,
        path: Path | None,
        stats: SaveStats,
        *,
        asynchronous: bool,
        own: bool = False,
    ) -> Save:
        config = self._config
        return Save(
            group,
            path,
            stats=stats,
            order=next_order(),
            asynchronous=asynchronous,
            own=own,
            background=own or (asynchronous and config.commit == "background"),
            overwrite=config.overwrite,
            timeout=config.commit_timeout,
            reading=config.read_deadline,
            exit_timeout=config.exit_timeout,
        )

    def _begin(self) -> Save:
        """A save begins in this thread: the one whose staged state DCP has just looked at, or a new one."""
        here = self._here
        staged, here.staged = here.staged, None
        path, here.path = here.path, None
        if staged is not None:
            save = staged
        else:
            end_here()
            self._check_open()
            step_gate.open_windows()  # no backward pass comes while this thread waits here
            # In a signal handler, what these need may be held by the very frame that it interrupts.
            stall = Stall(logger, "this save", self._config.commit_timeout)
            await_all(lambda: stall.look(moved(None), "the saves before it to be planned"))
            group = commit_group(self.rank_set)
            save = self._make_save(group, self._path, SaveStats(), asynchronous=False)
            bind(save)  # DCP may raise without calling finish(): Ctrl-C, say
            self._used = True
            save.begin()
            with self._lock:
                self._newest = save
                self._saves = [other for other in self._saves if not _is_told(other)]
                self._saves.append(save)
        here.save = save
        collect_ticket(save.deliver)
        if path is not None:
            try:
                save.path = self._checked(path, save.working_directory)
            except DataStatesError as error:
                save.error = save.error or error
        if save.error is not None:
            raise save.error
        return save

    def _save(self) -> Save:
        save = self._here.save
        if save is None:
            raise DataStatesError(
                "no save has begun in this thread: DCP calls storage_meta() and set_up_storage_writer() first"
            )
        return save

    def _over_unless_its_thread_tells(self, save: Save) -> None:
        # DCP's own thread ends with its save, and that ends the save here; the planning thread says so itself. The
        # thread that made the call lives on, and nothing tells of the end.
        if not save.own and (save.in_callers_thread or not save.asynchronous):
            end_here()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError("this DataStatesWriter is closed; construct another one")

    def _checked(self, path: str | os.PathLike[str], below: str | None = None) -> Path:
        directory = local.local_path(path, below)
        if self._alone:
            local.check_writable(directory)
        return directory

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a DataStatesWriter cannot be sent to another process: AsyncCheckpointerType.PROCESS is not "
            "supported, use AsyncCheckpointerType.THREAD (the default)"
        )


def _is_ours(planner: SavePlanner | None) -> bool:
    """Whether it plans just what it is known to plan: a hook may look at the state, and plan another."""
    return isinstance(planner, DataStatesSavePlanner) and is_unchanged(planner)


def _session(
    group: CommitGroup, staged: StagedState | None, state: Callable[[], dict[Any, Any]] | None
) -> Session:
    return Session(group.name, group.rank_set.rank, group.rank_set.world, staged, state)


def _note_told(save: Save, share: Share, digest: bytes) -> None:
    """When the save is committed, the coordinator has what this rank told it, and need not be told again."""
    whole = share.whole

    def note(committed: Future[None]) -> None:
        assert isinstance(committed, AskedFuture)
        # After a failure, what the coordinator remembers is not known.
        known = committed.peek() is None and share.sent == digest
        share.told = {whole: digest} if known else {}

    save.committed.add_done_callback(note)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _is_told(save: Save) -> bool:
    """Whether the save's outcome is known, and was told if it must be."""
    return save.over and (
        not save.background or save.committed.asked or save.committed.peek() is None
    )
