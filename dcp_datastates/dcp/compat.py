"""Saves that DCP runs: its threads, its future, its process group.

DCP makes its calls to the writer in a thread of its own, with what :meth:`DataStatesWriter.stage` returned in place of
the state. So two things must be found out that this package knows by itself of the saves that it runs:

- **which thread runs which save**: the one that first looks at the staged state (:class:`StagedStateDict`);
- **that a save ended early** (the planner of another rank failed, say): DCP tells a writer nothing. But its thread has
  ended then, which a thread of this module watches for.
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
    """A save that DCP's calls in a thread are for."""

    save: SaveOperation
    ahead: Ahead | None
    """What is read before it is planned, until it is written."""
    ends_here: bool
    """Whether the thread may live on after it, and nothing else tells that it has ended."""
    rank: int = 0
    is_coordinator: bool = False

    def end(self) -> None:
        """The writer's last call for it is over."""
        if self.ends_here:
            end_here()


class ThisThread(threading.local):
    """What DCP has told a writer so far in the calling thread."""

    path: str | os.PathLike[str] | None = None
    next: Running | None = None
    running: Running | None = None


class StagedStateDict(Mapping[Any, Any]):
    """The state at the call, as DCP's thread sees it: built in full when first looked at.

    ``begin`` runs once, in the thread that first looks (DCP's, which thereby becomes the thread of this save) and
    returns the state dict. Until then it is a token. It cannot be pickled: an error says why, and ``abandon`` is
    called.
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
    """Ends the saves whose threads have ended. Its own thread lives to the end of the process."""

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
            _join(watched[0][0])  # saves take turns, so the oldest mostly ends first
            watched = [each for each in watched if not _has_ended(*each)]


_Watched = tuple[threading.Thread, SaveOperation]
"""A thread, and the save that it runs."""


def _join(thread: threading.Thread) -> None:
    try:
        thread.join(_POLL_SECONDS)
    except (AssertionError, RuntimeError):  # a thread that Python has not made
        time.sleep(_POLL_SECONDS)


def _has_ended(thread: threading.Thread, save: SaveOperation) -> bool:
    try:
        if not thread.is_alive():
            save.end_planning()
    except Exception:  # a callback of the save's futures, say: the watch must go on
        logger.exception("a save could not be ended")
        return True
    return save.planning_is_over


class _Here(threading.local):
    save: SaveOperation | None = None


_here = _Here()
_lock = ProcessLock()  # guards _watch
_watch: _Watch | None = None


def bind(save: SaveOperation) -> None:
    """DCP's calls in the calling thread are for ``save`` from now on. Its planning is over when the thread ends."""
    global _watch
    end_here()
    _here.save = save
    with _lock:
        if _watch is None:
            _watch = _Watch()
    _watch.add(save)


def end_here(*, asynchronous: bool = True) -> None:
    """The save that the calling thread ran is over: it comes with another call, or ends.

    Not an ``asynchronous`` one, where the call may be that of a destructor, in the middle of it.
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


atexit.register(end_here)  # or a synchronous save that was interrupted would be waited for


_warned = False


def warn_if_shared() -> None:
    """Warn, once per process, if DCP's collectives can only run on training's own gloo group.

    DCP's thread and the training thread then run collectives on one gloo group at once, and their messages mix: the
    first save with three ranks that all-reduced meanwhile hung until gloo's timeout. A group of NCCL and gloo is no
    problem: training's tensors go by NCCL.
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
    """Whether DCP may have been given another group than the default one."""
    return len(dist.distributed_c10d._world.pg_map) > 1
