"""The storage writer: the methods that DCP calls, in order, for one save after another.

A synchronous save and DCP's half of an asynchronous one make the same calls, in one thread::

    [reset]  storage_meta  set_up_storage_writer  prepare_local_plan  [prepare_global_plan]
    write_data  [finish]                                         [coordinator only, or if an id is given]

Before an asynchronous save, DCP calls ``stage`` in the training thread. The writer may serve several saves together, so
it holds no state of a save: each has a :class:`~dcp_datastates.saving.operation.SaveOperation`, found by the calling
thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from dcp_datastates.commit.group import commit_group
from dcp_datastates.config import Reads, WriterConfig
from dcp_datastates.dcp.compat import (
    StagedStateDict,
    ThisThread,
    begin_synchronous,
    publish,
    warn_if_shared,
)
from dcp_datastates.dcp.planner import WriterMeta
from dcp_datastates.dcp.turn import DcpSave
from dcp_datastates.errors import ConfigurationError, DataStatesError
from dcp_datastates.io.devices import open_used
from dcp_datastates.io.engine import engine
from dcp_datastates.process.forks import public
from dcp_datastates.process.futures import resolved
from dcp_datastates.ranks.rank_set import ALONE, RankSet, rank_set_of
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.outcome import SaveOrigin, conclude_call
from dcp_datastates.saving.start import Saves, check_path, end_here, prepare, stage_save, writable
from dcp_datastates.staging import step_gate
from dcp_datastates.storage.object_path import Location, ObjectPath, locate

NO_PATH: Final = "no path to save to: pass path, or a writer that has one"


class DataStatesWriter(StorageWriter, AsyncStager):
    """Saves through a native pipeline; ``dcp.async_save`` returns before deferred tensors are read.

    Pass it as ``storage_writer=`` to :func:`torch.distributed.checkpoint.save` or ``async_save``, with any planner.
    Construct one writer per save, or one for all saves and pass ``checkpoint_id``.

    In ``async_save``, tensors that an optimizer owns (its parameters and state, from 64 KiB up) are *deferred*: native
    threads read them during the next forward and backward, and the step gate holds the next ``optimizer.step()`` until
    they have been read. Everything else is copied at the call. The checkpoint holds the state of the call; if that
    cannot be guaranteed, the save fails with :class:`SnapshotTornError` and is not committed.

    Args:
        path: Directory of the checkpoint; created if missing. ``~`` is the home directory. A relative path is below the
            present working directory (``checkpoint_id``: that at the call of the save). Symbolic links are followed
            once per save. A URL such as ``"s3://bucket/run/step-100"`` is a prefix in an object store. None if every
            save passes ``checkpoint_id``.
        host_cache_size: Host memory for staging, bytes or a string such as ``"4GiB"``; at least 32 MiB. ``"auto"`` is 4
            GiB, or less if the ranks of a machine together would take more than a quarter of the memory that they may
            use (physical, or a cgroup's limit). For a state on CUDA devices, it grows to what this rank writes, within
            that quarter. Memory is allocated on first use. All writers of the process share the cache; the largest size
            requested counts. A checkpoint may be larger: then its reads wait for storage. Raise it, up to a rank's
            state, if ``optimizer.step()`` waits for that.
        reads: When the tensors are read. ``"backward"``: what an optimizer owns, in the background, from the next
            backward pass on, or a second after the call; the rest in the call. Seconds (0 to 3600) in place of that
            second: if reads disturb a longer forward pass. ``"immediate"``: from the call on; if a step is shorter than
            the reads. ``"all"``: the rest, too, in the background from the call on; only if you know that until
            :attr:`captured` nothing but an optimizer's ``step()`` changes a tensor. ``"blocking"``: all in the call; if
            the program writes to weights elsewhere (:class:`SnapshotTornError` says so).
        overwrite: Whether a save may replace a committed checkpoint at the path. The old checkpoint can be loaded until
            the new one is committed, whatever happens. False if a path must be new.
        process_group: The ranks that save together, the same group that DCP gets; None means all. Only its list of
            ranks is used; no collective runs on it.
        no_dist: This process saves alone, like DCP's option of that name: for a state that no other rank has.
        storage_options: For URLs: fsspec's options for the file system, such as credentials. They are never shown. None
            takes all from the environment.
        commit_timeout: Seconds without progress after which a live rank fails the save (a rank that has not called
            ``async_save``, say; in ``dcp.async_save`` after 10 s, if training waits for it). A rank that is dead, or
            silent for a minute, fails the save in any case. Raise it if storage stalls for longer.
        exit_timeout: Seconds for which the end of the process waits for saves in flight. Saves not committed by then
            fail, and the log names them. Lower it if the job is killed sooner than that.
        max_in_flight: How many asynchronous saves of this process may be in flight before ``when_behind`` applies.
        when_behind: What ``async_save`` does then: ``"wait"`` for the oldest; ``"skip"`` this save, if training must
            not wait. The ranks agree on that, and the future of a save that is left out raises
            :class:`CheckpointSkipped`. (:attr:`committed` of a save that DCP runs does so on the ranks that were
            behind; on others it raises :class:`SaveAbandonedError`.)
        audit: For one run, after a :class:`SnapshotTornError`: compare every byte that is read later with a copy made
            at the call, to name every write.
        compare_replicas: Compare what several ranks hold alike (replicas in data parallelism, in HSDP) byte for byte,
            so that each byte is compared once in so many saves, such as 10. Each save reads so much more, in the
            background: one n-th of the replicas of each rank, which are summed and not written. A difference fails the
            save with :class:`ReplicasDifferError`, which names tensors, bytes, ranks and hosts; and ``latest(root,
            verify="replicas")`` finds the newest checkpoint whose replicas are known to be equal. The first rank's
            value counts. Not with a planner of your own. None: a few words of each replica are compared at each save.

    Raises:
        ConfigurationError: an option has a value that cannot work, ``path`` is a file, or the library for its store is
            not installed.
        StorageError: there is no permission to create the checkpoint. (Errors about ``path`` are raised here only with
            one rank; with several, the save raises them on all ranks.)

    Threads: one thread at a time may save, as with any DCP writer. Any thread may call :attr:`captured`, :meth:`wait`
    and :meth:`close`.
    """

    _synchronize_after_execute = False  # dcp.async_save must not wait for the reads
    _closed = False

    @public("DataStatesWriter()")
    def __init__(
        self,
        path: str | os.PathLike[str] | ObjectPath | None = None,
        *,
        host_cache_size: int | str = "auto",
        reads: Reads = "backward",
        overwrite: bool = True,
        process_group: Any = None,
        commit_timeout: float = 300.0,
        exit_timeout: float = 600.0,
        max_in_flight: int = 4,
        when_behind: str = "wait",
        audit: bool = False,
        compare_replicas: int | None = None,
        no_dist: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.config = WriterConfig.checked(
            host_cache_size=host_cache_size,
            reads=reads,
            overwrite=overwrite,
            commit_timeout=commit_timeout,
            exit_timeout=exit_timeout,
            max_in_flight=max_in_flight,
            when_behind=when_behind,
            audit=audit,
            compare_replicas=compare_replicas,
        )
        self._process_group = process_group
        self._no_dist = no_dist
        self._storage_options = storage_options
        self._alone = self.rank_set is ALONE  # raises if this process is not in the group
        self._path = None if path is None else self._checked(path)
        self._here = ThisThread()
        self._saves = Saves()
        self._used = False
        self.on_begin: Callable[[SaveOperation], object] = lambda save: None
        """Called with each save that begins, before it is planned. The manager's: it may archive the save."""
        prepare(self.rank_set, self.config).count_unused(1)
        open_used(engine(self.config.host_cache_bytes))

    # ---- for the user --------------------------------------------------------------------------

    @property
    def captured(self) -> Future[None]:
        """A future of the newest ``async_save``: done when all data are read, and the state may be changed freely.
        ``result()`` raises the error if the save failed before that. Done already if there was no such save.
        """
        newest = self._saves.newest
        return resolved() if newest is None else newest.reads.captured

    @property
    def committed(self) -> Future[None]:
        """A future of the newest save: done when it is committed on all ranks, or has failed.
        This future is authoritative: DCP's may raise although the save is committed, if DCP lost the coordinator
        afterwards. ``result()`` raises an error of this package that names the rank, or :class:`CommitOutcomeUnknown`.
        Done already if there was no save. Callbacks run in the commit thread, and must not wait for another save.
        """
        newest = self._saves.newest
        return resolved() if newest is None else newest.committed

    @property
    def last_save(self) -> SaveStats | None:
        """This rank's statistics of the newest save; None before the first."""
        newest = self._saves.newest
        return None if newest is None else newest.stats

    @public("DataStatesWriter.wait()")
    def wait(self) -> None:
        """Block until the outcome of every save of this writer is known; starts their reads now.

        Raises the error of a failed save by :func:`dcp_datastates.async_save` whose outcome was not asked for.
        """
        step_gate.open_windows()
        end_here(asynchronous=False)
        self._saves.wait()

    @public("DataStatesWriter.close()")
    def close(self) -> None:
        """Call :meth:`wait`, then refuse further saves. Idempotent. The process's engine stays."""
        try:
            self.wait()
        finally:
            self._closed = True
            self._count_used()

    # ---- AsyncStager ---------------------------------------------------------------------------

    @public("DataStatesWriter.stage()")
    def stage(self, state_dict: Mapping[str, Any]) -> Any:
        """Stage ``state_dict``: copy the eager tensors, arm the step gate and the read window, return.

        ``dcp.async_save`` calls it in the training thread. Raises :class:`ConfigurationError`. Errors that one rank
        alone may have (:class:`UnsupportedTensorError`, :class:`CheckpointExistsError`, :class:`StorageError`) are
        raised here only with one rank; with several, the future raises them on all ranks.
        """
        if not self._no_dist:
            warn_if_shared()
        self.enter()
        stats = SaveStats()
        try:
            save = stage_save(
                commit_group(self.rank_set),
                self.config,
                SaveOrigin.DCP_ASYNC,
                self._path,
                state_dict,
                in_columns=True,
                metrics={},
                stats=stats,
            )
        except BaseException as error:
            conclude_call(SaveOrigin.DCP_ASYNC, self.rank_set, self._path, stats, error)
            raise
        self.add(save)
        return StagedStateDict(DcpSave(save), self._here)

    @public("DataStatesWriter.synchronize_staging()")
    def synchronize_staging(self) -> None:
        """Block until :attr:`captured` is done; raises its error."""
        step_gate.open_windows()
        self.captured.result()

    # ---- StorageWriter, in the order of DCP's calls ----------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer can save to ``checkpoint_id``: a path, or a URL with a bucket. Opens nothing."""
        try:
            locate(checkpoint_id)
        except ConfigurationError:
            return False
        return True

    @property
    def checkpoint_id(self) -> str:
        """The path, for DCP's logs."""
        return "" if self._path is None else str(self._path)

    @public("DataStatesWriter.reset()")
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the path of the save that begins in this thread.

        DCP calls this in the thread that runs the save. A relative path is below the working directory at the call of
        ``async_save``.
        """
        self._here.path = checkpoint_id

    @public("DataStatesWriter.storage_meta()")
    def storage_meta(self) -> StorageMeta:
        """Begin the save of this thread: that whose staged state DCP has just read, or a new one. DCP's first call."""
        here = self._here
        running, here.next = here.next, None
        path, here.path = here.path, None
        if running is None:
            self.enter()
            running = begin_synchronous(commit_group(self.rank_set), self.config, self._path)
            self.add(running.save)
        here.running = running
        save = running.save
        if path is not None:
            try:
                save.path = self._checked(path, save.working_directory)
            except DataStatesError as error:
                save.record_error(error)
        if save.error is not None:
            raise save.error
        return WriterMeta(str(save.directory()))

    @public("DataStatesWriter.set_up_storage_writer()")
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note this process's rank. Refuses ``use_collectives=False``: the ranks could not commit together."""
        running = self._running()
        running.rank, running.is_coordinator = int(kwargs.get("rank") or 0), is_coordinator
        if not kwargs.get("use_collectives", True):
            raise ConfigurationError(
                "use_collectives=False is not supported: a checkpoint is committed once, for all ranks; "
                "leave it True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that the checkpoint may be written. DCP gets an empty plan: :meth:`write_data` plans the save."""
        running = self._running()
        check_path(running.save)
        return running.keep(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: check that DCP saves with the writer's ranks."""
        self._running().set_world(len(plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Plan the save with the other ranks, and write this rank's part; returns when all of its data are read and
        unchanged. The ``plan`` is empty.

        DCP's default planner and :class:`DataStatesSavePlanner` are planned for in columns. Any other planner is asked
        again for what it has made of empty plans: ``create_global_plan`` with the plans of all ranks, on the
        coordinator, and ``finish_plan``. The files become durable later; the commit thread waits for that. Raises
        :class:`SnapshotTornError`, :class:`UnsupportedTensorError`, :class:`StorageError`, or an error of the planner;
        then this save fails on all ranks.
        """
        self._running().write(planner)
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Coordinator: return when the save is committed, or raise its error. ``metadata`` become those of the save."""
        publish(metadata, *self._running().finish())

    # ---- for this package's async_save ---------------------------------------------------------------

    @property
    def rank_set(self) -> RankSet:
        """The ranks that commit together."""
        return rank_set_of(self._process_group, self._no_dist)

    def enter(self) -> None:
        """Begin a call that uses this writer. Raises :class:`ConfigurationError` if it is closed."""
        self._count_used()
        if self._closed:
            raise ConfigurationError("this DataStatesWriter is closed; construct another one")
        end_here()

    def path_of(self, path: str | os.PathLike[str] | ObjectPath | None) -> Location:
        """The directory of a call with this ``path``. Raises :class:`ConfigurationError` if neither names one."""
        if path is not None:
            return self._checked(path)
        if self._path is None:
            raise ConfigurationError(NO_PATH)
        return self._path

    def add(self, save: SaveOperation) -> None:
        """Count ``save`` among this writer's. It is not planned yet."""
        self._saves.add(save)
        self.on_begin(save)

    # ---- within ------------------------------------------------------------------------------------

    def _running(self) -> DcpSave:
        running = self._here.running
        if running is None:
            raise DataStatesError(
                "no save has begun in this thread: DCP calls storage_meta() and set_up_storage_writer() first"
            )
        return running

    def _count_used(self) -> None:
        if not self._used:
            self._used = True
            commit_group(self.rank_set).count_unused(-1)

    def _checked(
        self, path: str | os.PathLike[str] | ObjectPath, below: str | None = None
    ) -> Location:
        return writable(path, self.config, self._alone, below, self._storage_options)

    def __repr__(self) -> str:
        newest = self._saves.newest
        saves = "no save yet" if newest is None else f"newest save: {newest.path}, {newest.doing}"
        return f"DataStatesWriter({self.checkpoint_id!r}, {'closed, ' * self._closed}{saves})"

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a DataStatesWriter cannot be sent to another process: AsyncCheckpointerType.PROCESS is not "
            "supported, use AsyncCheckpointerType.THREAD (the default)"
        )
