"""How a save starts: staged in the training thread, taken up by the thread that plans it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_datastates._native import Slab, Window
from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.publish import check_overwrite
from dcp_datastates.config import WriterConfig
from dcp_datastates.errors import CheckpointSkipped, DataStatesError
from dcp_datastates.io.engine import engine, moved, next_order
from dcp_datastates.planning.exchange import Session
from dcp_datastates.planning.rank_memory import SharesPlanner
from dcp_datastates.process.waiting import Stall, WaitLog
from dcp_datastates.saving.admission import enter, make_room
from dcp_datastates.saving.call import LEFT_OUT, SaveCall, Way
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.turns import await_all
from dcp_datastates.saving.write import Ahead, read_ahead
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.buffers import EagerBuffers
from dcp_datastates.staging.deferred_reads import DeferredReads
from dcp_datastates.staging.ownership import Ownership, known_optimizers
from dcp_datastates.staging.stage import StagedState, stage_state
from dcp_datastates.stats import SaveStats
from dcp_datastates.storage.failpoints import hit

__all__ = ["TakenUp", "stage_save", "start_synchronous", "take_up"]

logger = logging.getLogger(__name__)


def stage_save(
    group: CommitGroup,
    config: WriterConfig,
    way: Way,
    path: Path | None,
    state_dict: Mapping[str, Any],
    planned_here: bool,
) -> SaveOperation:
    """What a call of ``async_save`` does in the training thread: stage the state, hold optimizers back.

    Args:
        group: the ranks that commit together.
        config: the writer's.
        way: who runs the save.
        path: where to; None if DCP will say.
        state_dict: what to save.
        planned_here: whether the planner may know this package, and need not be given the state.

    Waits for room, by ``when_behind``. What fails on this rank is raised here if it is alone; else the save carries
    it to the other ranks.
    """
    began = time.perf_counter()
    left_out = make_room(config.max_in_flight, config.when_behind)
    missed = 0 if way is Way.PACKAGE else group.missed
    call = SaveCall(group, config, way, path, next_order(), missed)
    stats = SaveStats()
    staged: StagedState | None = None
    slab: Slab | None = None
    failure: BaseException | None = CheckpointSkipped(LEFT_OUT[left_out]) if left_out else None
    try:
        hit("stage.before")
        if failure is None:
            staged, slab = _stage(call, state_dict)
        hit("stage.after")
    except BaseException as error:
        failure = error
    window = Window(0.0 if config.read_window == "immediate" else config.read_deadline)
    reads = DeferredReads(staged, slab, window, call.order, stats, config.commit_timeout)
    session: Session | None = None
    if failure is not None:
        reads.fail(failure)
        alone = group.rank_set.world == 1 and not left_out
        if alone or not isinstance(failure, Exception):
            raise failure
    elif staged is not None:
        stats.eager_bytes = staged.eager_bytes
        stats.deferred_bytes = sum(staged.deferred.sizes)
        if config.read_window != "immediate" and staged.deferred.sizes:
            step_gate.arm_backward()
        if planned_here:
            # On DCP's own way, DCP has the state itself.
            state = reads.state if call.own else None
            ranks = group.rank_set
            session = Session(group.name, ranks.rank, ranks.world, staged, state)
            # Now: the tensors may have other forms by the time that they are planned.
            session.look()
    save = SaveOperation(call, stats, session, reads, failure, left_out)
    enter(save)
    stats.stage_seconds = time.perf_counter() - began
    return save


def _stage(call: SaveCall, state_dict: Mapping[str, Any]) -> tuple[StagedState, Slab | None]:
    config = call.config
    if call.path is not None:
        check_overwrite(call.path, config.overwrite)
    native = engine(config.host_cache_bytes)
    buffers = EagerBuffers(native, call.order)
    ownership = Ownership(known_optimizers())  # with defer="none", the planner asks
    try:
        staged = stage_state(state_dict, ownership, config.defer, native, buffers.allocate)
    except BaseException:
        buffers.release()
        raise
    return staged, buffers.slab


def start_synchronous(group: CommitGroup, config: WriterConfig, path: Path | None) -> SaveOperation:
    """A save that DCP runs in the calling thread, when those before it are planned. Starts their reads.

    Raises :class:`SaveStalledError` if they make no progress.
    """
    step_gate.open_windows()  # no backward pass comes while this thread waits here
    # In a signal handler, what these need may be held by the very frame that it interrupts.
    stall = Stall(logger, "this save", config.commit_timeout)
    await_all(lambda: stall.look(moved(None), "the saves before it to be planned"))
    call = SaveCall(group, config, Way.DCP, path, next_order(), group.missed)
    ranks = group.rank_set
    session = Session(group.name, ranks.rank, ranks.world, None, None)  # DCP has the state itself
    return SaveOperation(call, SaveStats(), session)


@dataclass(frozen=True, eq=False)
class TakenUp:
    """A save in the thread that plans it."""

    save: SaveOperation
    state: dict[Any, Any]
    """What DCP is given to plan; empty where the planner asks the session for it, or the save has failed."""
    ahead: Ahead | None = None
    """What is read before it is planned."""


def take_up(save: SaveOperation, planner: SharesPlanner | None = None) -> TakenUp:
    """The calling thread plans ``save``: returns when its turn has come.

    What goes wrong is in ``save.error``, and raised in DCP's first step: there it is told to the other ranks, and here
    they would wait.

    Args:
        save: an asynchronous one.
        planner: what will plan it, if it may know what to read ahead.
    """
    assert save.turn is not None
    assert save.reads is not None
    ahead: Ahead | None = None
    save.turn.come()
    try:
        if not save.failed:
            save.reads.begin()
            if planner is not None and save.call.config.when_behind == "wait":
                # Before this save's turn, so that its reads wait for no other's bookkeeping. Here, and
                # not in the training thread, which has better things to do.
                ahead = _read_ahead(save, planner)
    except Exception as error:
        save.blame(error)
    log = WaitLog(logger, f"the save to {str(save.path)!r}")
    save.turn.wait(lambda: log.look("its turn; the threads of the saves before it have not ended"))
    state: dict[Any, Any] = {}
    try:
        save.begin()
        # A planner that knows this package asks the session for the state, and mostly need not.
        if not (save.failed or (save.call.own and save.session is not None)):
            state = save.reads.state()
    except Exception as error:
        save.blame(error)
    if save.error is not None:
        save.reads.fail(save.error)  # its memory is free at once
    return TakenUp(save, state, ahead)


def _read_ahead(save: SaveOperation, planner: SharesPlanner) -> Ahead | None:
    assert save.reads is not None
    try:
        return read_ahead(save, planner)
    except DataStatesError:
        raise
    except Exception:  # then it is read when it is planned
        logger.exception("could not read ahead")
        save.reads.discard()
        return None
