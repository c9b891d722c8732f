"""``CheckpointManager``: a training loop's checkpoints, in a call for each step."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

import torch.distributed as dist
from typing_extensions import Unpack

from dcp_datastates.checkpoints.find import Verification, check_verification
from dcp_datastates.checkpoints.first_rank import DEFAULT_TIMEOUT
from dcp_datastates.checkpoints.keep import Keep
from dcp_datastates.config import WriterOptions, check_options, parse_flag
from dcp_datastates.dcp.async_save import SaveHandle, async_save
from dcp_datastates.dcp.writer import DataStatesWriter
from dcp_datastates.errors import ConfigurationError, SaveStalledError
from dcp_datastates.format.stored_names import Rename
from dcp_datastates.journal.audit import Audit
from dcp_datastates.journal.journal import Journal
from dcp_datastates.loading.fit import Answer, LoadOptions
from dcp_datastates.manager.continuing import Continuing, Fresh
from dcp_datastates.manager.keeping import Keeping
from dcp_datastates.manager.save_tracker import MaxFailures, SaveTracker, is_committed
from dcp_datastates.manager.schedule import AutoInterval, Schedule, parse_every
from dcp_datastates.manager.signals import Signals
from dcp_datastates.manager.step_consensus import StepConsensus
from dcp_datastates.manager.step_directories import StepDirectories
from dcp_datastates.process.forks import in_child, public
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.ranks.rank_set import rank_set_of
from dcp_datastates.saving.start import archive_roots
from dcp_datastates.storage.object_path import Location, locate_all
from dcp_datastates.training.training_state import TrainingState

if TYPE_CHECKING:
    from dcp_datastates.weights.publish import Weights

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, deletes, stops and resumes for a training loop. Each checkpoint is a directory ``root/step-N``.

    ::

        state = {"model": model, "optimizer": optimizer, "rng": RngState()}
        with CheckpointManager("ckpt", every=100, keep=Keep(last=3), on_signal=(SIGTERM,)) as manager:
            done = manager.restore_latest(state)
            for step in range(0 if done is None else done + 1, 10_000):
                ...
                manager.save(step, state)
                if manager.stopping:
                    break

    Every rank makes the same calls. Call :meth:`save` at each step, after the optimizer; it saves when a save is due.
    If ranks must agree on that (on time, signals, costs), they exchange numbers after each step, for the next.

    Args:
        root: The directory of the checkpoints, or its URL.
        every: When to save: at steps that are a multiple of this number; after a time, such as ``"10min"``; or
            ``"auto"``, which is :class:`AutoInterval` with its defaults.
        keep: The checkpoints to keep: a number of the newest, or a :class:`Keep`. After each commit, a thread of the
            first rank deletes the others. None: all, which storage must hold; nothing is deleted unasked.
        on_signal: Signals that announce the end of the job. If one comes to any rank, all ranks save at the next step,
            and :attr:`stopping` is true from then on.
        deadline: How long after the signal the job may go on, such as ``"25s"``: a save that is not committed by then
            fails by name, and :meth:`close` returns. None: it waits for the outcome.
        save_last: Whether :meth:`close` saves the step of the last call of :meth:`save`, with the state as it is then,
            if that call did not save. An error in the ``with`` block prevents this. False if ``every`` is enough.
        max_failures: This many failed saves in a row end the loop: the next save that is due, or the end of the
            ``with`` block, raises the last error, on all ranks. Others are logged and counted (:attr:`failures`).
            ``"auto"``: 5, or one more than ``max_in_flight``. 1 if no step may go on without its checkpoint: then each
            save waits for the one before it. None if the loop must never end for that. Where the saves in flight could
            make it so many, a save that is due waits for them.
        verify: The check that a checkpoint must pass to be restored, and to count for ``keep``: see :func:`latest`.
        fresh: What to do if the loop saves at a step that is not above those in the root, without a restore:
            ``"refuse"``; or ``"replace"``: move them to ``root/set-aside-TIME`` (a store copies each byte for that).
        rename: With ``missing`` and ``exclude``: the :class:`LoadOptions` of each restore. Those of a call go before.
        missing: See ``rename``.
        exclude: See ``rename``.
        process_group: The ranks that save; None: all.
        archive: A slower tier, a directory or URL, or a list of some, the nearest first. Checkpoints are copied there
            in the background, before they may be deleted from ``root``. :meth:`restore_latest` takes the newest of all.
        archive_every: Archive every n-th checkpoint that is saved, the first among them: more than 1 if it lags.
        archive_keep: The checkpoints to keep in each archive, as for ``keep``; None: all.
        archive_rate: How fast each rank may copy, such as ``"500MB/s"``, if others need the network; None: no limit.
        publish: A :class:`Weights`: the model's weights are published from each checkpoint, in the background.
        journal: Whether each step is recorded beside the checkpoints, to compare it after a resume: :attr:`audit`.
        options: The options of :class:`DataStatesWriter`, such as ``host_cache_size``.

    Threads: one thread uses a manager. With ``on_signal``, the main thread must construct it.

    Raises:
        ConfigurationError: an option cannot work.
    """

    @public("CheckpointManager()")
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: int | str | AutoInterval,
        keep: int | Keep | None = None,
        on_signal: Iterable[int] = (),
        deadline: float | str | None = None,
        save_last: bool = True,
        max_failures: MaxFailures = "auto",
        verify: Verification = "structure",
        fresh: Fresh = "refuse",
        rename: Rename | None = None,
        missing: Answer = "error",
        exclude: str | Iterable[str] = (),
        process_group: dist.ProcessGroup | None = None,
        archive: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        archive_every: int = 1,
        archive_keep: int | Keep | None = None,
        archive_rate: int | str | None = None,
        publish: Weights | None = None,
        journal: bool = False,
        **options: Unpack[WriterOptions],
    ) -> None:
        check_options("CheckpointManager", options, WriterOptions)
        stores = options.get("storage_options")
        roots = locate_all([root, *archive_roots(archive, stores)], stores)
        self.root: Final = roots[0]
        self._keep = None if keep is None else Keep.of(keep)
        check_verification(verify)
        self._save_last = parse_flag("save_last", save_last)
        self._steps = StepDirectories(roots, verify)
        rule = parse_every(every)
        ranks = partial(rank_set_of, process_group, options.get("no_dist", False))
        self._rank_set = ranks()
        self._writer = DataStatesWriter(process_group=process_group, **options)
        config = self._writer.config
        self._saves = SaveTracker(max_failures, max_in_flight=config.max_in_flight)
        self._journal = Journal(self.root, self._rank_set, parse_flag("journal", journal))
        if self._journal.only_audits:  # which changes nothing in any tier
            publish, roots = None, roots[:1]
            archive_every, archive_keep, archive_rate = 1, None, None
        rules = self._keep, archive_every, archive_keep, archive_rate
        tiers = StepDirectories(roots, verify)
        self._keeping = Keeping(tiers, self._saves, self._rank_set, *rules, publish=publish)
        fit: LoadOptions = {"rename": rename, "missing": missing, "exclude": exclude}
        given = ranks, config.commit_timeout, fresh, fit
        self._continuing = Continuing(self._steps, *given, self._keeping.adopt)
        self._signals = Signals(on_signal, deadline)
        needs_ranks = bool(self._signals.watched) or not isinstance(rule, int)
        self._schedule = Schedule(rule, StepConsensus(self._rank_set) if needs_ranks else None)
        self._writer.on_begin = self._keeping.begun
        self._newest_save: tuple[int, SaveHandle | None] | None = None
        self._unsaved: tuple[int, Mapping[str, Any], Mapping[str, float] | None] | None = None
        """The arguments of the last call of :meth:`save`, if it did not save."""
        self._ending = self._closed = False
        self.stopping = False
        """Whether the loop should end: a signal has come to a rank, and this step is saved. The same on all ranks."""

    @property
    def interval(self) -> str:
        """The interval between saves and its reason, in words."""
        return str(self._schedule)

    @property
    def failures(self) -> int:
        """The number of failed saves, without those that ``when_behind`` left out."""
        return self._saves.failures

    def path(self, step: int) -> Location:
        """The directory of the checkpoint of ``step``."""
        return self._steps.path(step)

    # ---- looking: each rank asks the file system for itself ----------------------------------------------

    @public("CheckpointManager.steps()")
    def steps(self) -> list[int]:
        """The steps that have committed checkpoints, in order."""
        return self._steps.committed()

    @property
    @public("CheckpointManager.latest_step")
    def latest_step(self) -> int | None:
        """The step of the newest committed checkpoint, whether it can be restored or not; None if there is none."""
        return self._steps.latest()

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint that ``Keep(best=…)`` counts as the best; None without one."""
        return None if self._keep is None else self._steps.best(self._keep)

    # ---- saving --------------------------------------------------------------------------------------

    @public("CheckpointManager.should_save()")
    def should_save(self, step: SupportsIndex) -> bool:
        """Whether :meth:`save` will save at ``step``, its next step. Use it for work that only a save needs.

        The same on all ranks. If the ranks exchange numbers, this waits for those of the step before.

        Raises the errors of :meth:`save`.
        """
        return self._schedule.is_due(self._checked(step), self._signals.came)

    @public("CheckpointManager.poll()")
    def poll(self) -> bool:
        """Whether the next :meth:`save` will save and end the loop, because a signal has come: for evaluations and
        compilations, in which :meth:`save` is not called.

        Every rank calls it as often as the others, and all get the same answer in the same call. It does not wait,
        unless a rank is a whole call behind: with one rank, a signal is seen immediately; with more, the ranks tell
        each other in one call, and know in the next. Without ``on_signal``, False.

        Raises as :meth:`save`, if the ranks cannot tell each other.
        """
        return bool(self._signals.watched) and self._schedule.poll(self._signals.came)

    def _checked(self, step: SupportsIndex) -> int:
        if self._closed:
            raise ConfigurationError("the manager is closed; save within its with block")
        return self._schedule.checked(step)

    @public("CheckpointManager.save()")
    def save(
        self,
        step: SupportsIndex,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        force: bool = False,
    ) -> SaveHandle | None:
        """Save if a save is due. Call this at each step, after the optimizer's.

        It does not wait for the commit. (With ``max_failures=1``, it waits for the save before it.)

        Args:
            step: The step that is done, which becomes the checkpoint's number. It must be greater than that of the call
                before. Repeat a step only with ``force=True``, after the loop.
            state: Names to models, optimizers, objects with ``state_dict()`` and ``load_state_dict()``, tensors and
                values. A value that differs between ranks must be a :class:`PerRank` or a :class:`RngState` (a
                ``StatefulDataLoader`` of torchdata counts as a :class:`PerRank`).
            metrics: Numbers that are stored with the checkpoint, as for :func:`async_save`.
            force: Save in any case, also if a save of this step has failed; the same on all ranks. Waits for the saves
                in flight.

        Returns:
            A handle of the save; None if none is due.

        Raises:
            ConfigurationError: ``step`` or ``state`` cannot work, or a restore has failed half way.
            RankLostError, NoAnswerError: the ranks exchange numbers, and a rank was lost or did not make the call.
            DataStatesError: the error of an earlier save, as ``max_failures`` says.
        """
        step = self._checked(step)
        self._unsaved = None
        self._continuing.called(step)
        self._saves.take()
        decision = self._schedule.at(step, self._signals.came, force)
        self.stopping = self._journal.note(step, state, metrics) or self.stopping or decision.stop
        if self._journal.only_audits:
            self._schedule.not_saved()
            return None
        if not decision.save:
            self._unsaved = step, state, metrics
            return None
        if decision.stop:
            self._signals.stop()
        if force or decision.stop:  # so that this save is not left out, whatever when_behind says
            self._saves.finish(self._signals.until)
        self._saves.check()
        saved_step, saved = self._newest_save or (None, None)
        if saved_step == step and is_committed(saved) is not False:
            self._schedule.not_saved()
            return saved
        if decision.stop:
            text = "a signal announces the end of the job: step %d is saved"
            logger.log(once_per_job(logging.WARNING), text, step)
        handle = self._begin(step, state, metrics)
        self._newest_save = step, handle
        return handle

    def _begin(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float] | None
    ) -> SaveHandle | None:
        try:
            self._continuing.before_save()
            self._keeping.check()
            parts = TrainingState(state, self._rank_set)
            is_first = self._newest_save is None and not self._ending
            if self._keep is not None and is_first and self._rank_set.rank == 0:
                self._keep.check(metrics)
            self._journal.saving(step, state)
            path = self.path(step)
            self._keeping.make_room(self._writer.config.commit_timeout)
            handle = self._saves.begin(
                path, lambda: async_save(parts.parts, path, writer=self._writer, metrics=metrics)
            )
        except BaseException as error:
            self._schedule.not_saved()
            # With one rank, async_save itself raises what else fails the save on all ranks.
            if self._saves.most == 1 or not isinstance(error, (OSError, SaveStalledError)):
                raise
            self._saves.failed(self.path(step), error)
            logger.error("step %d is not saved: %s", step, error)
            return None
        self._schedule.saved(handle)
        self._keeping.follow(handle)
        return handle

    # ---- restoring -----------------------------------------------------------------------------------

    @public("CheckpointManager.restore_latest()")
    def restore_latest(
        self,
        state: Mapping[str, Any],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[LoadOptions],
    ) -> int | None:
        """Restore the newest checkpoint that can be loaded into ``state``; return its step, None if there is none.

        A damaged checkpoint is skipped, with a line in the log, and the next older one is restored. Waits for saves in
        flight. Every rank calls this.

        Args:
            state: As for :meth:`save`. Models, optimizers and tensors are filled in place: names and shapes must be
                those that were saved. An object's ``load_state_dict()`` receives exactly what was saved. Dicts are
                filled with all that was saved of them. Other values are replaced in ``state``, which must then be a
                dict.
            timeout: Seconds for which the other ranks wait for the first one (default: 300). With ``verify="full"`` it
                reads all files.
            options: :class:`LoadOptions`, for a program that has changed since the save: ``only``, ``exclude``,
                ``rename``, ``missing``, ``unexpected``, ``cast``; ``allow_objects`` and ``share_reads``.

        Raises:
            CheckpointCorruptError: all checkpoints are damaged. The loop must not start over unnoticed.
            ConfigurationError: there are only checkpoints of other names than ``step-N``; an option cannot work.
            ForeignCheckpointError: there are only checkpoints of other programs, which the loop would overwrite.
            IncompatibleStateError, UnsafeObjectError, StorageError: as for :func:`load`.
        """
        self._prepare_restore()
        step = self._continuing.restore_latest(state, options, timeout, self._journal.only_audits)
        if step is not None:
            self._schedule.restored(step)
            self._journal.resumed(step, state)
        return step

    @public("CheckpointManager.restore()")
    def restore(self, step: int, state: Mapping[str, Any], **options: Unpack[LoadOptions]) -> int:
        """Restore the checkpoint of ``step`` into ``state``, as :meth:`restore_latest`; returns ``step``.

        The loop may go back to an earlier step: its next save is then the newest checkpoint. Waits for saves in flight.
        Raises the errors of :func:`load`.
        """
        self._prepare_restore()
        self._schedule.restored(self._continuing.restore(step, state, options))
        self._journal.resumed(step, state)
        return step

    @property
    @public("CheckpointManager.audit")
    def audit(self) -> Audit | None:
        """How this rank's steps after a resume compare with the run before, so far. None without ``journal``."""
        return self._journal.result()

    def _prepare_restore(self) -> None:
        self._saves.drain()  # one may be the newest; and reads may be of tensors to fill
        self._continuing.check_ranks()
        self._newest_save = self._unsaved = None

    @public("CheckpointManager.wait()")
    def wait(self) -> None:
        """Return when the outcome of every save is known, what is to be archived is, and old checkpoints are deleted.

        Raises the error of a failed save as ``max_failures`` says.
        """
        try:
            self._saves.finish(self._signals.until)
        finally:
            self._keeping.wait()

    # ---- ending --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Save the last step (``save_last``), then wait for the outcome of every save, for deletions, and, for at most
        ``exit_timeout``, for the archive. Idempotent.

        Raises the error of a failed save as ``max_failures`` says.
        """
        self._end(self._save_last)

    @public()
    def _end(self, save_last: bool) -> None:
        if self._closed or in_child():  # a child leaves the with block of its parent
            return
        self._ending = True  # a step that was not due may have no metrics
        try:
            if save_last and self._unsaved is not None:
                self.save(*self._unsaved, force=True)
            self._saves.finish(self._signals.until)
        finally:
            self._closed = True
            if self._rank_set.rank == 0 and (line := self._saves.summary(self.root)):
                logger.log(line[0], "closed: %s", line[1])
            self._journal.close()
            self._schedule.close()
            self._signals.close()
            self._keeping.wait(self._signals.left(self._writer.config.exit_timeout))
            self._keeping.close()
            self._writer.close()

    def __repr__(self) -> str:
        closed = ", closed" * self._closed
        return f"CheckpointManager({str(self.root)!r}, {self._saves.standing()}{closed})"

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end(self._save_last and error is None)
        except Exception as failure:
            if error is None:
                raise
            logger.error("a save was not committed: %s", failure)  # the loop's own error goes on
