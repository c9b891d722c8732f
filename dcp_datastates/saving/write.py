"""Carries out one rank's part of a plan: resolve it, lay it out, hand it to the engine, and wait until it is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch.distributed as dist

from dcp_datastates._native import SaveJob, Window
from dcp_datastates.config import WriterConfig
from dcp_datastates.io.engine import engine, fit_cache
from dcp_datastates.planning.save_planning import SavePlanning, WriteJob
from dcp_datastates.process.memory_limit import largest_host_cache_bytes
from dcp_datastates.process.waiting import Stall
from dcp_datastates.saving import output
from dcp_datastates.saving.files import Sources, write_job
from dcp_datastates.saving.not_a_number import look_for_nan
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.staging.deferred_reads import await_reads
from dcp_datastates.storage.attempt import Attempt

__all__ = ["Writing", "begin_write", "fail_write"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Writing:
    """A rank's part of a save whose reads have begun."""

    _save: SaveOperation
    _planning: SavePlanning
    _attempt: Attempt
    _content: WriteJob
    _part: output.WrittenPart
    _samples: bytes

    def finish(self) -> None:
        """Wait until all data are read, and check that they are unchanged; then the files are for the commit thread.

        Raises :class:`SnapshotTornError`, :class:`SaveStalledError` and errors of storage; then no read or write is in
        progress but one that a device or storage holds up.
        """
        save, content, planning, part = self._save, self._content, self._planning, self._part
        job = part.job
        try:
            if save.reads is None:
                stall = Stall(logger, f"save {save.call.order}", save.call.config.commit_timeout)
                await_reads(job, -1, stall)
            else:
                try:
                    save.reads.settle(save.call.config.read_deadline)
                finally:
                    save.reads.raise_failure()
            if (error := part.error) is not None:
                raise error
        except BaseException:
            output.cancel(job)
            raise
        save.stats.timeline.begin("reading", job.read_seconds)
        save.stats.timeline.begin("flushing")
        content.keep.clear()  # all is read: release the copies and the tensors
        report = planning.report(self._attempt, content, self._samples)
        save.submit(part, report, planning.compose(save.call.metrics))


def begin_write(save: SaveOperation, planning: SavePlanning) -> Writing:
    """Begin to read and write this rank's part of ``save``. The planning lets go of the state.

    When an error is raised, no read or write is in progress.
    """
    try:
        return _begin(save, planning, save.ticket().attempt)
    finally:
        planning.release()


def _begin(save: SaveOperation, planning: SavePlanning, attempt: Attempt) -> Writing:
    reads, stats, rank = save.reads, save.stats, save.group.rank_set.rank
    folder = save.resolved_path() / attempt.name
    native = engine(save.call.config.host_cache_bytes)
    look_for_nan(save, None if reads is None else reads.staged)
    synced = save.on_storage("looking for the attempt", lambda: output.make_ready(folder, rank))
    try:
        content = write_job(Sources(native, planning, reads, save.progress), folder, rank)
    except RuntimeError:  # the planner met a tensor that is not as planned
        if reads is not None:
            reads.check_unchanged()
        raise
    if reads is not None and reads.fences:  # from devices
        _fit_cache(save.call.config, content)
    stats.steady = planning.is_cached and content.is_known
    begun: list[Writing] = []

    def start(window: Window) -> SaveJob:
        samples = planning.sample(attempt)  # while the gate still holds
        part = output.begin(
            native,
            folder,
            synced,
            content,
            stats,
            order=save.call.order,
            window=window,
            expected=None if reads is None else reads.staged.expected,
        )
        save.progress.follow(part.job)
        begun.append(Writing(save, planning, attempt, content, part, samples))
        return part.job

    if reads is None:
        start(Window(0.0))
    else:
        reads.hand_over(start, content.readers)
    stats.timeline.begin("window")
    return begun[0]


def fail_write(save: SaveOperation, error: BaseException) -> None:
    """Free the save's memory, and vote against it: the vote decides the outcome on all ranks."""
    if save.reads is not None:
        save.reads.fail(error)
    save.submit_failure(error)


def _fit_cache(config: WriterConfig, content: WriteJob) -> None:
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    most = largest_host_cache_bytes(ranks) if config.cache_grows else config.host_cache_bytes
    fit_cache(content.nbytes, most)
