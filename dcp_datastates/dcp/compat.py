"""Saves that DCP runs: what its calls have said so far, the state that it sees, its process group."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.config import WriterConfig
from dcp_datastates.dcp.object_planning import ObjectPlanning
from dcp_datastates.dcp.planner import NO_PLAN, options_in_columns, plan_in_columns, planned_state
from dcp_datastates.dcp.turn import Turn
from dcp_datastates.errors import ConfigurationError, DataStatesError, SaveAbandonedError
from dcp_datastates.format.metadata_objects import metadata_of
from dcp_datastates.io.committed import open_committed
from dcp_datastates.io.engine import moved
from dcp_datastates.planning.column_planning import StateToPlan
from dcp_datastates.planning.save_planning import SavePlanning
from dcp_datastates.process.waiting import Wait
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.outcome import SaveOrigin
from dcp_datastates.saving.rank_context import context_of
from dcp_datastates.saving.start import end_here, stage_in_place
from dcp_datastates.staging import step_gate
from dcp_datastates.storage.object_path import Location, locate

logger = logging.getLogger(__name__)


class DcpSave:
    """A save that DCP runs, by the calls that DCP has made for it so far. One thread makes them.

    Args:
        state: the state that DCP has got from ``stage()``; None if it has the program's own.
    """

    def __init__(self, turn: Turn, state: dict[Any, Any] | None = None) -> None:
        self.save = turn.save
        self.rank = 0
        """This process's rank for DCP."""
        self.is_coordinator = False
        """Whether it is DCP's coordinator."""
        self._turn = turn
        self._state = state
        self._plan: SavePlan | None = None  # this rank's, of its planner

    def keep(self, plan: SavePlan) -> SavePlan:
        """Keep this rank's ``plan``; return the empty one that DCP is shown."""
        self._plan = plan
        forget_cached_plans()
        return dataclasses.replace(plan, items=[], planner_data={})

    def set_world(self, world: int) -> None:
        """Note, on DCP's coordinator, with how many ranks DCP saves."""
        rank_set = self.save.group.rank_set
        if world == 1 != rank_set.world:  # no_dist=True, or a group of one
            self.save.save_alone()
        elif world != rank_set.world:
            raise ConfigurationError(
                f"DCP saves with {world} ranks, the writer commits with {rank_set.world} "
                f"({'all' if rank_set.world > 1 else 'this process alone'}): pass the process_group= that is "
                f"given to dcp.save or dcp.async_save to DataStatesWriter too"
            )

    def write(self, planner: SavePlanner) -> None:
        """Plan the save with this package's pipeline; write this rank's part; return when all its data are read. If it
        raises, the save has failed.
        """
        save = self.save
        forget_cached_plans()
        self._turn.have_all_come = True
        try:
            try:
                finish = context_of(save.group).plan(save, self._planning(planner))
            finally:
                self._turn.planned()
            finish()
        except BaseException as error:
            save.record_error(error)
            save.fail_part(error)
            self._end()
            raise
        if not self.is_coordinator:
            self._end()

    def _planning(self, planner: SavePlanner) -> SavePlanning | None:
        """How the save is planned; None if it has failed on this rank."""
        save, plan, self._plan = self.save, self._plan, None
        try:
            self._check(planner, plan)
            if save.error is not None or plan is None:
                return None
            if options_in_columns(planner) is None:
                staged = save.reads.staged if save.asynchronous else None
                return ObjectPlanning(planner, lambda _: plan, staged)
            assert isinstance(planner, DefaultSavePlanner)
            state, paths = planned_state(planner)
            if not save.asynchronous:
                stage_in_place(save, state)
                state_of_call = StateToPlan(save.reads.staged, save.reads.state, paths)
            else:  # it was staged at the call, as the program has it
                built = self._state
                assert built is not None, "DCP has read it"
                state_of_call = StateToPlan(save.reads.staged, lambda: built)
            return plan_in_columns(planner, context_of(save.group).planner, state_of_call)
        except Exception as error:
            save.record_error(error)  # the ranks agree first: others wait for this one
            return None

    def finish(self, metadata: Metadata) -> None:
        """Coordinator: return when the save is committed, or raise why not. The ``metadata`` become the save's."""
        save = self.save
        try:
            attempt = save.ticket().attempt.name
            save.await_decision()
            publish(metadata, save.resolved_path(), attempt)
        finally:
            self._end()

    def _check(self, planner: SavePlanner, plan: SavePlan | None) -> None:
        if self.save.has_ended:
            raise SaveAbandonedError("DCP has come to this save too late: later saves have begun")
        plans_nothing = plan is not None and plan.planner_data == NO_PLAN.planner_data
        if plans_nothing and options_in_columns(planner) is None:
            raise ConfigurationError(
                f"a {type(planner).__name__} that uses a DataStatesSavePlanner cannot plan for a DataStatesWriter: "
                f"pass the DataStatesSavePlanner itself, or derive from it"
            )
        rank_set = self.save.group.rank_set
        if rank_set.rank != self.rank:
            raise ConfigurationError(
                f"this is rank {self.rank} of the process group that DCP saves with, and rank "
                f"{rank_set.rank} of the writer's; pass the same process_group= to both"
            )
        if self.is_coordinator != (self.rank == 0):
            raise ConfigurationError(
                "DCP's coordinator must be the first rank: leave coordinator_rank=0"
            )

    def _end(self) -> None:
        """Note that the writer's last call is over. The thread of an asynchronous save ends after it; until then it may
        be in DCP's collectives. Alone, there are none.
        """
        save = self.save
        if not save.asynchronous or save.group_of_call.rank_set.world == 1:
            end_here()


def forget_cached_plans() -> None:
    """Make DCP's planners plan their next save anew. With ``enable_plan_caching=True`` they keep plans, of which some
    are the empty ones that they were shown, and would take these for a later save's, also by another writer.
    """
    getattr(SavePlanner, "_cached_save_plan", {}).clear()


def begin_async(turn: Turn) -> dict[Any, Any]:
    """Make the calling thread the one that runs the save; return its state when it is the save's turn.

    An error here goes to ``save.error``, and DCP's first step raises it: there the other ranks learn of it. If it were
    raised here, they would wait.
    """
    save, reads = turn.save, turn.save.reads
    turn.come()
    log = Wait(logger, f"the save to {str(save.path)!r}")
    state: dict[Any, Any] = {}
    try:
        if save.error is None:
            reads.begin()
        turn.wait(lambda: log.look("its turn; the threads of the saves before it have not ended"))
        save.begin()
        if save.error is None:
            state = reads.state()
    except Exception as error:
        save.record_error(error)
    if save.error is not None:
        reads.fail(save.error)  # frees its memory immediately
    return state


def begin_synchronous(group: CommitGroup, config: WriterConfig, path: Location | None) -> DcpSave:
    """Begin a save that DCP runs in the calling thread, after all earlier saves are planned. Starts their reads.

    Raises :class:`SaveStalledError` if the earlier saves make no progress.
    """
    step_gate.open_windows()  # no backward pass can begin while this thread waits
    stats = SaveStats()
    stats.timeline.begin("queue")
    turn = Turn(SaveOperation(group, config, SaveOrigin.DCP, path, stats, {}))
    save = turn.save
    # If this is a signal handler, the interrupted frame may hold what the earlier saves need: so the wait must end.
    wait = Wait(logger, "this save", config.commit_timeout)
    try:
        turn.wait(lambda: wait.look("the saves before it to be planned", moved(None)))
        save.begin()
    except BaseException as error:
        save.record_error(error)
        save.end()
        raise
    return DcpSave(turn)


class ThisThread(threading.local):
    """The calls that DCP has made to a writer so far in the calling thread."""

    path: str | os.PathLike[str] | None = None
    next: DcpSave | None = None
    running: DcpSave | None = None


class StagedStateDict(Mapping[Any, Any]):
    """The state at the call, as DCP's thread sees it. It is built when first read.

    The first thread that reads it (DCP's) thereby becomes the thread of the save, whose turn begins ``here``. Pickling
    raises an error that says why it cannot work, after ending the save.
    """

    def __init__(self, turn: Turn, here: ThisThread) -> None:
        self._turn, self._here = turn, here
        self._staged: dict[Any, Any] | None = None

    def _state(self) -> dict[Any, Any]:
        if self._staged is None:
            self._staged = {}
            self._staged = begin_async(self._turn)
            self._here.next = DcpSave(self._turn, self._staged)
        return self._staged

    def __getitem__(self, key: Any) -> Any:
        return self._state()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state())

    def __len__(self) -> int:
        return len(self._state())

    def __reduce__(self) -> Any:
        error = ConfigurationError(
            "a state staged by DataStatesWriter lives in this process and cannot be sent to another: "
            "use async_checkpointer_type=AsyncCheckpointerType.THREAD (the default); "
            "AsyncCheckpointerType.PROCESS is not supported"
        )
        self._turn.save.record_error(error)
        self._turn.save.end()
        raise error


_warned = False


def warn_if_shared() -> None:
    """Warn, once per process, if DCP's collectives can only run on training's own gloo group.

    DCP's thread and the training thread would then run collectives on one gloo group together, and their messages would
    get mixed up: with three ranks that all-reduced during the first save, the job hung until gloo's timeout. A group
    with NCCL and gloo is no problem: training's tensors use NCCL.
    """
    global _warned
    if _warned or not dist.is_available() or not dist.is_initialized():
        return
    if dist.get_world_size() == 1 or dist.get_backend(dist.group.WORLD) != "gloo":
        return
    if _is_another_group_there():
        return
    _warned = True
    warnings.warn(
        "async_save runs DCP's collectives on the default gloo group, in a thread of their own. If training "
        "uses that group too, the two mix up each other's messages and hang. Pass "
        'process_group=torch.distributed.new_group(backend="gloo"), made once, to async_save; or use '
        "dcp_datastates.async_save, which brings its own.",
        stacklevel=3,
    )


def _is_another_group_there() -> bool:  # which the job may have passed to DCP
    return len(dist.distributed_c10d._world.pg_map) > 1


# ---- the metadata that DCP is given --------------------------------------------------------------

FIELDS: Final = frozenset(field.name for field in dataclasses.fields(Metadata))


class PublishedMetadata(Metadata):
    """A ``Metadata`` that reads its fields from the file at the first access, which raises :class:`DataStatesError` if
    the save is not committed, or another save has replaced it.
    """

    def __init__(self, directory: str | Location, attempt: str) -> None:
        self.directory = directory
        self.attempt = attempt

    def __getattribute__(self, name: str) -> Any:
        # Fields with a default are also class attributes, so __getattr__ would not be called.
        if name in FIELDS and name not in object.__getattribute__(self, "__dict__"):
            self._load()
        return object.__getattribute__(self, name)

    def _load(self) -> None:
        try:
            table = open_committed(locate(self.directory)).table
        except FileNotFoundError:
            raise DataStatesError(
                f"nothing is committed at {str(self.directory)!r}: wait for the save's future, or writer.committed"
            ) from None
        attempt = table.note.attempt.name
        if attempt != self.attempt:
            raise DataStatesError(
                f"{str(self.directory)!r} holds attempt {attempt}; that of this save, {self.attempt}, is not "
                f"committed, or was replaced"
            )
        found = metadata_of(table)
        vars(self).update({name: getattr(found, name) for name in FIELDS}, **vars(found))

    def __reduce__(self) -> Any:
        if vars(self).keys() >= FIELDS:  # already read, and perhaps changed
            return functools.partial(Metadata, **{name: vars(self)[name] for name in FIELDS}), ()
        # Other processes get no storage_options, which may be secret: theirs come from the environment.
        return PublishedMetadata, (str(self.directory), self.attempt)

    def __repr__(self) -> str:
        return f"PublishedMetadata({str(self.directory)!r}, {self.attempt!r})"


def publish(metadata: Metadata, directory: Location, attempt: str) -> None:
    """Turn ``metadata``, which a planner has made of empty plans, into those of the committed save: DCP returns this
    object. Those of a planner's own class are filled now.
    """
    published = PublishedMetadata(directory, attempt)
    if type(metadata) in (Metadata, PublishedMetadata):
        metadata.__class__ = PublishedMetadata
        vars(metadata).clear()
        vars(metadata).update(vars(published))
    else:
        for name in FIELDS:
            setattr(metadata, name, getattr(published, name))
