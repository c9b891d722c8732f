"""What DCP sees of a save that it runs: its state, its turn, its process group, its metadata."""

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
from torch.distributed.checkpoint.metadata import Metadata

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.config import WriterConfig
from dcp_datastates.dcp.turn import DcpSave
from dcp_datastates.errors import ConfigurationError, DataStatesError
from dcp_datastates.format.metadata_objects import metadata_of
from dcp_datastates.io.committed import open_committed
from dcp_datastates.io.engine import moved
from dcp_datastates.process.waiting import Wait
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.outcome import SaveOrigin
from dcp_datastates.staging import step_gate
from dcp_datastates.storage.object_path import Location, locate

logger = logging.getLogger(__name__)


def _begin_async(running: DcpSave) -> dict[Any, Any]:
    """Make the calling thread the one that runs the save; return its state when it is the save's turn.

    An error here goes to ``save.error``, and DCP's first step raises it: there the other ranks learn of it. If it were
    raised here, they would wait.
    """
    save, reads = running.save, running.save.reads
    running.come()
    log = Wait(logger, f"the save to {str(save.path)!r}")
    state: dict[Any, Any] = {}
    try:
        if save.error is None:
            reads.begin()
        running.wait(
            lambda: log.look("its turn; the threads of the saves before it have not ended")
        )
        save.begin()
        if save.error is None:
            state = reads.state()
    except Exception as error:
        save.record_error(error)
    if save.error is not None:
        reads.fail(save.error)  # frees its memory immediately
    running.state = state
    return state


def begin_synchronous(group: CommitGroup, config: WriterConfig, path: Location | None) -> DcpSave:
    """Begin a save that DCP runs in the calling thread, after all earlier saves are planned. Starts their reads.

    Raises :class:`SaveStalledError` if the earlier saves make no progress.
    """
    step_gate.open_windows()  # no backward pass can begin while this thread waits
    stats = SaveStats()
    stats.timeline.begin("queue")
    running = DcpSave(SaveOperation(group, config, SaveOrigin.DCP, path, stats, {}))
    save = running.save
    # If this is a signal handler, the interrupted frame may hold what the earlier saves need: so the wait must end.
    wait = Wait(logger, "this save", config.commit_timeout)
    try:
        running.wait(lambda: wait.look("the saves before it to be planned", moved(None)))
        save.begin()
    except BaseException as error:
        save.record_error(error)
        save.end()
        raise
    return running


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

    def __init__(self, running: DcpSave, here: ThisThread) -> None:
        self._running, self._here = running, here
        self._staged: dict[Any, Any] | None = None

    def _state(self) -> dict[Any, Any]:
        if self._staged is None:
            self._staged = {}
            self._staged = _begin_async(self._running)
            self._here.next = self._running
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
        self._running.save.record_error(error)
        self._running.save.end()
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
        table = open_committed(locate(self.directory)).table
        attempt = table.note.attempt.name
        if attempt != self.attempt:
            raise DataStatesError(
                f"{str(self.directory)!r} holds attempt {attempt}; that of this save, {self.attempt}, is not "
                f"committed, or was replaced"
            )
        found = metadata_of(table)
        vars(self).update(vars(found))

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
