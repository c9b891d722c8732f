"""Saves that DCP runs: its threads, its future, its process group.

DCP calls the writer in a thread that DCP starts, and passes the result of :meth:`DataStatesWriter.stage` as the state.
So this module finds out two facts, which this package knows by itself for the saves that it runs:

- **which thread runs which save**: the thread that first reads the staged state (:class:`StagedStateDict`);
- **that a save ended early** (another rank's planner failed, say): DCP does not report an early end to the writer. A
  thread of this module detects that DCP's thread has ended.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.process.forks import ProcessLock, after_fork
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.write import Ahead

__all__ = ["Running", "StagedStateDict", "ThisThread", "bind", "end_here", "warn_if_shared"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.05


@dataclass(eq=False)
class Running:
    """The save that a thread's DCP calls belong to."""

    save: SaveOperation
    ahead: Ahead | None
    """The reads that began before planning; None after ``write_data`` has taken them."""
    ends_here: bool
    """Whether the save ends with the writer's last call: its thread may live on (a synchronous save)."""
    rank: int = 0
    is_coordinator: bool = False

    def end(self) -> None:
        """Note that the writer's last call for the save is over."""
        if self.ends_here:
            end_here()


class ThisThread(threading.local):
    """The calls that DCP has made to a writer so far in the calling thread."""

    path: str | os.PathLike[str] | None = None
    next: Running | None = None
    running: Running | None = None


class StagedStateDict(Mapping[Any, Any]):
    """The state at the call, as DCP's thread sees it. It is built when first read.

    The first thread that reads it (DCP's) thereby becomes the thread of this save, and runs ``begin``, once, which
    returns the state dict. Pickling raises an error that says why it cannot work, after calling ``abandon``.
    """

    def __init__(
        self, begin: Callable[[], dict[Any, Any]], abandon: Callable[[BaseException], None]
    ) -> None:
        self._begin: Callable[[], dict[Any, Any]] | None = begin
        self._abandon = abandon
        self._staged: dict[Any, Any] = {}

    def _state(self) -> dict[Any, Any]:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self._staged = begin()
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
        self._abandon(error)
        raise error


class _Watch:
    """Ends the planning of saves whose threads have ended. Its own thread is a daemon."""

    def __init__(self) -> None:
        self._arriving: queue.SimpleQueue[_Watched] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="dcp_datastates-watch", daemon=True).start()

    def add(self, save: SaveOperation) -> None:
        """Watch the calling thread until the planning of ``save`` is over."""
        self._arriving.put((threading.current_thread(), save))

    def _run(self) -> None:
        watched: list[_Watched] = []
        while True:
            if not watched:
                watched.append(self._arriving.get())
            while not self._arriving.empty():
                watched.append(self._arriving.get())
            _join(watched[0][0])  # saves take turns, so the oldest usually ends first
            watched = [each for each in watched if not _has_ended(*each)]


_Watched = tuple[threading.Thread, SaveOperation]
"""A thread, and the save that it runs."""


def _join(thread: threading.Thread) -> None:
    try:
        thread.join(_POLL_SECONDS)
    except (AssertionError, RuntimeError):  # a thread that Python did not start
        time.sleep(_POLL_SECONDS)


def _has_ended(thread: threading.Thread, save: SaveOperation) -> bool:
    try:
        if not thread.is_alive():
            save.end_planning()
    except Exception:  # from a callback of a future, say: this thread must go on
        logger.exception("a save could not be ended")
        return True
    return save.planning_is_over


class _Here(threading.local):
    save: SaveOperation | None = None


_here = _Here()
_lock = ProcessLock()  # guards _watch
_watch: _Watch | None = None


def bind(save: SaveOperation) -> None:
    """Bind ``save`` to the calling thread: DCP's calls there belong to it. Its planning is over when the
    thread ends.
    """
    global _watch
    end_here()
    _here.save = save
    with _lock:
        if _watch is None:
            _watch = _Watch()
    _watch.add(save)


def end_here(*, asynchronous: bool = True) -> None:
    """End the planning of the calling thread's save, when the thread makes another call or ends.

    ``asynchronous=False`` spares asynchronous saves: a destructor may make the call while such a save is running.
    """
    save = _here.save
    if save is not None and (asynchronous or not save.call.asynchronous):
        _here.save = None
        save.end_planning()


@after_fork
def _forget_in_child() -> None:
    global _watch
    _watch = None
    _here.save = None


atexit.register(end_here)  # else the process would wait for an interrupted synchronous save


_warned = False


def warn_if_shared() -> None:
    """Warn, once per process, if DCP's collectives can only run on training's own gloo group.

    DCP's thread and the training thread would then run collectives on one gloo group at once, and their messages would
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


def _is_another_group_there() -> bool:
    """Whether the job has another group than the default one, which it may have passed to DCP."""
    return len(dist.distributed_c10d._world.pg_map) > 1
