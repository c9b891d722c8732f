"""How a save starts: the training thread stages it, and another thread begins to plan it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_datastates._native import Window
from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.publish import check_overwrite
from dcp_datastates.config import WriterConfig
from dcp_datastates.errors import CheckpointSkipped, ConfigurationError, DataStatesError
from dcp_datastates.io.devices import capturing
from dcp_datastates.io.engine import engine, moved, next_order
from dcp_datastates.planning.exchange import Session
from dcp_datastates.planning.rank_plan_cache import SharesPlanner
from dcp_datastates.process.waiting import Stall, WaitLog
from dcp_datastates.saving.admission import enter, make_room
from dcp_datastates.saving.call import LEFT_OUT, SaveCall, SaveOrigin
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.turns import await_all
from dcp_datastates.saving.write import Ahead, read_ahead
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.buffers import EagerBuffers
from dcp_datastates.staging.deferred_reads import DeferredReads
from dcp_datastates.staging.ownership import Ownership, known_optimizers
from dcp_datastates.staging.stage import stage_state
from dcp_datastates.stats import SaveStats
from dcp_datastates.storage.bounded import bounded
from dcp_datastates.storage.failpoints import hit

__all__ = ["PlanningInput", "begin_planning", "stage_save", "start_synchronous"]

logger = logging.getLogger(__name__)


def stage_save(
    group: CommitGroup,
    config: WriterConfig,
    origin: SaveOrigin,
    path: Path | None,
    state_dict: Mapping[str, Any],
    planned_here: bool,
    metrics: Mapping[str, float],
) -> SaveOperation:
    """The part of ``async_save`` in the training thread: stage the state, and arm the step gate for deferred reads.

    Args:
        origin: which API and thread run the save.
        path: the checkpoint's directory; None if DCP passes it later.
        planned_here: whether the planner may know this package, and so need not receive the state.
        metrics: the numbers by which the user compares checkpoints.

    May wait for earlier saves (``when_behind``). If staging fails, a rank alone raises here; with several ranks, the
    save carries the error, and planning tells the others.
    """
    if capturing():
        raise ConfigurationError(
            "async_save was called while a CUDA graph is being captured; call it outside"
        )
    began = time.perf_counter()
    left_out = make_room(config.max_in_flight, config.when_behind)
    missed = 0 if origin is SaveOrigin.PACKAGE else group.missed
    call = SaveCall(group, config, origin, path, next_order(), missed, metrics)
    stats = SaveStats()
    failure: BaseException | None = CheckpointSkipped(LEFT_OUT[left_out]) if left_out else None
    reads: DeferredReads | None = None
    session: Session | None = None
    try:
        hit("stage.before")
        if failure is None:
            reads = _stage(call, state_dict, stats)
            if planned_here:
                session = _session(call, reads)
        hit("stage.after")
    except BaseException as error:
        failure, session = error, None
    if reads is None:
        reads = DeferredReads(None, None, Window(0.0), call.order, stats, config.commit_timeout)
    if failure is not None:
        reads.fail(failure)
        alone = group.rank_set.world == 1 and not left_out
        if alone or not isinstance(failure, Exception):
            raise failure
    save = SaveOperation(call, stats, session, reads, failure, left_out)
    try:
        enter(save)
    except BaseException as error:  # an interrupt: no thread will plan the save
        save.fail(save.record_error(error))
        save.end_planning()
        raise
    stats.stage_seconds = time.perf_counter() - began
    return save


def _stage(call: SaveCall, state_dict: Mapping[str, Any], stats: SaveStats) -> DeferredReads:
    config = call.config
    if (path := call.path) is not None and not config.overwrite:
        timeout = config.commit_timeout
        bounded("looking at", path, timeout, lambda: check_overwrite(path, False))
    native = engine(config.host_cache_bytes)
    buffers = EagerBuffers(native, call.order)
    ownership = Ownership(known_optimizers())  # with defer="none", the planner asks
    immediate = config.read_window == "immediate"
    window = Window(0.0 if immediate else config.read_deadline)
    try:
        staged = stage_state(
            state_dict,
            ownership,
            config.defer,
            native,
            buffers.allocate,
            call.order,
            config.audit,
        )
        reads = DeferredReads(
            staged, buffers.slab, window, call.order, stats, config.commit_timeout
        )
    except BaseException:
        buffers.release()
        raise
    stats.eager_bytes = staged.eager_bytes
    stats.deferred_bytes = sum(staged.deferred.sizes)
    try:
        if not immediate and staged.deferred.sizes and not step_gate.arm_backward():
            window.open()
    except BaseException as error:
        reads.fail(error)
        raise
    return reads


def _session(call: SaveCall, reads: DeferredReads) -> Session:
    group, ranks = call.group, call.group.rank_set
    # With dcp.async_save, DCP has the state itself.
    state = reads.state if call.own else None
    session = Session(group.name, ranks.rank, ranks.world, reads.staged, state)
    session.look()  # now: the tensors' shapes may change before they are planned
    return session


def start_synchronous(group: CommitGroup, config: WriterConfig, path: Path | None) -> SaveOperation:
    """Start a save that DCP runs in the calling thread, after all earlier saves are planned. Starts their reads.

    Raises :class:`SaveStalledError` if the earlier saves make no progress.
    """
    step_gate.open_windows()  # no backward pass can begin while this thread waits
    # If this is a signal handler, the interrupted frame may hold what the earlier saves need: so the wait must end.
    stall = Stall(logger, "this save", config.commit_timeout)
    await_all(lambda: stall.look(moved(None), "the saves before it to be planned"))
    call = SaveCall(group, config, SaveOrigin.DCP, path, next_order(), group.missed)
    ranks = group.rank_set
    session = Session(group.name, ranks.rank, ranks.world, None, None)  # DCP has the state itself
    return SaveOperation(call, SaveStats(), session)


@dataclass(frozen=True, eq=False)
class PlanningInput:
    """What the planning of a save starts from."""

    save: SaveOperation
    state: dict[Any, Any]
    """The state that DCP plans; empty if the planner asks the session for it, or the save has failed."""
    ahead: Ahead | None = None
    """The reads that have begun before planning."""


def begin_planning(save: SaveOperation, planner: SharesPlanner | None = None) -> PlanningInput:
    """Make the calling thread the one that plans ``save``; returns when it is the save's turn.

    An error here goes to ``save.error``, and DCP's first step raises it: there the other ranks learn of it. If it were
    raised here, they would wait.

    Args:
        save: an asynchronous save.
        planner: the planner, if it may know what to read ahead.
    """
    assert save.turn is not None
    assert save.reads is not None
    ahead: Ahead | None = None
    save.turn.come()
    try:
        if not save.failed:
            save.reads.begin()
            if planner is not None and save.call.config.when_behind == "wait":
                # Before this save's turn, so that its reads do not wait for other saves' planning; and in this thread,
                # so that training does not wait.
                ahead = _read_ahead(save, planner)
    except Exception as error:
        save.record_error(error)
    log = WaitLog(logger, f"the save to {str(save.path)!r}")
    save.turn.wait(lambda: log.look("its turn; the threads of the saves before it have not ended"))
    state: dict[Any, Any] = {}
    try:
        save.begin()
        # A planner that knows this package gets the state from the session, and mostly does not need it.
        if not (save.failed or (save.call.own and save.session is not None)):
            state = save.reads.state()
    except Exception as error:
        save.record_error(error)
    if save.error is not None:
        save.reads.fail(save.error)  # frees its memory at once
    return PlanningInput(save, state, ahead)


def _read_ahead(save: SaveOperation, planner: SharesPlanner) -> Ahead | None:
    assert save.reads is not None
    try:
        return read_ahead(save, planner)
    except DataStatesError:
        raise
    except Exception:  # then the state is read after planning
        logger.exception("could not read ahead")
        save.reads.discard()
        return None
