"""Saves that a training framework starts and does not wait for: their options, their outcomes, and the deletions that
have to wait for them.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from dcp_datastates.checkpoints.deletions import Deletions
from dcp_datastates.config import WriterConfig
from dcp_datastates.dcp.async_save import async_save
from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.dcp.writer import DataStatesWriter
from dcp_datastates.errors import ConfigurationError

__all__ = ["BackgroundSaves", "pop_writer_options"]

logger = logging.getLogger(__name__)

_NOT_OFFERED: Final = ("self", "path", "process_group", "no_dist", "commit", "overwrite")
"""Parameters of the writer that the framework determines."""

_DEFAULTS: Final[dict[str, Any]] = {
    name: parameter.default
    for name, parameter in inspect.signature(DataStatesWriter.__init__).parameters.items()
    if name not in _NOT_OFFERED
}


_MISSPELLED: Final = 0.75
"""Names that are at least so similar are taken for the same. No option of a framework is so similar to one of ours."""


def pop_writer_options(keywords: dict[str, Any]) -> dict[str, Any]:
    """Move this package's options (``host_cache_size``, …) out of a framework's ``keywords``, and check them.

    Raises :class:`ConfigurationError` for a value that cannot work, and for a misspelled name.
    """
    chosen = {name: keywords.pop(name) for name in _DEFAULTS if name in keywords}
    for name in keywords:
        if near := difflib.get_close_matches(name, _DEFAULTS, 1, _MISSPELLED):
            raise ConfigurationError(f"there is no option {name!r}; did you mean {near[0]!r}?")
    WriterConfig.checked(**{**_DEFAULTS, **chosen}, overwrite=True, commit="wait")
    return chosen


@dataclass(frozen=True)
class _Deletion:
    number: int
    """Of the save whose commit it waits for."""
    path: Path | None
    """What it deletes, if that is one path."""
    action: Callable[[], object]


class BackgroundSaves:
    """The saves of one training job, one after the other, to paths that the framework chooses.

    Every rank makes the same calls, in the same order. A save that fails is logged by the package, and training goes
    on; with ``strict``, the next save, or :meth:`wait`, raises its error, on all ranks. For that, each save then waits
    for the one before it.

    Args:
        options: options of :class:`~dcp_datastates.DataStatesWriter`, from :func:`pop_writer_options`.
        strict: whether a failed save ends the training.

    Threads: one thread calls the methods. Deletions run in a thread of their own, on the first rank only.
    """

    def __init__(self, options: Mapping[str, Any], *, strict: bool = False) -> None:
        if not isinstance(strict, bool):
            raise ConfigurationError(f"strict={strict!r} must be True or False")
        self._options = dict(options)
        self._strict = strict
        self._writer: DataStatesWriter | None = None
        self._handles: list[tuple[int, SaveHandle]] = []  # of saves that may be in flight, numbered
        self._deletions = Deletions()
        self._lock = threading.Lock()  # guards what follows
        self._started = 0
        self._committed = 0  # the number of the last save that was committed
        self._paths: dict[int, Path] = {}  # of the saves that are not committed
        self._failed: set[int] = set()
        self._waiting: list[_Deletion] = []
        self._orphaned: dict[Path, list[_Deletion]] = {}
        """By the path of a save that failed: what it was to replace."""

    def start(self, state: Mapping[str, Any], path: str | os.PathLike[str]) -> SaveHandle | None:
        """Start the save of ``state`` to ``path``. Returns None if it could not begin, which is logged.

        Raises :class:`ConfigurationError`; with ``strict``, also the error of this save if it cannot begin, and that
        of the save before it.
        """
        if self._strict:
            self.wait()
        self._handles = [each for each in self._handles if not each[1].committed.done()]
        directory = Path(os.path.abspath(path))
        with self._lock:
            self._started += 1  # also if it fails: then what it should replace stays
            number = self._started
            self._paths[number] = directory
            self._waiting = [each for each in self._waiting if each.path != directory]
        try:
            if self._writer is None:
                self._writer = DataStatesWriter(**self._options)
            handle = async_save(state, path, writer=self._writer)
        except ConfigurationError:
            raise
        except Exception as error:
            self._fail(number)
            if self._strict:
                raise
            logger.error("the save to %s could not begin, and training goes on: %s", path, error)
            return None
        self._handles.append((number, handle))
        handle.committed.add_done_callback(lambda outcome: self._ended(number, outcome))
        return handle

    def wait(self) -> None:
        """Return when the outcome of every save is known, and the deletions that were due are done.

        Starts their reads at once. With ``strict``, raises the error of a save that has failed.
        """
        handles, self._handles = self._handles, []
        for number, handle in handles:
            handle.wait()
            self._ended(number, handle.committed)  # the callback may come later
        self._deletions.wait()
        if self._strict:
            for _, handle in handles:
                handle.result()

    def when_committed(
        self, action: Callable[[], object], *, deletes: str | os.PathLike[str] | None = None
    ) -> None:
        """Call ``action``, on the first rank, once the newest save, or a later one, is committed.

        It is a deletion, and runs in a background thread; its errors are logged. If ``deletes`` names the path of what
        the newest save replaces, ``action`` is not called if a later save goes to the path; and if the newest save
        fails, only when what replaces that is committed.
        """
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        path = None if deletes is None else Path(os.path.abspath(deletes))
        with self._lock:
            self._await(_Deletion(self._started, path, action))
            if path is not None:
                for each in self._orphaned.pop(path, ()):
                    self._await(_Deletion(self._started, each.path, each.action))
        self._delete_what_is_due()

    def _await(self, deletion: _Deletion) -> None:
        if deletion.path is not None and deletion.number in self._failed:
            replacing = self._paths[deletion.number]
            self._orphaned.setdefault(replacing, []).append(deletion)
        else:
            self._waiting.append(deletion)

    def _ended(self, number: int, outcome: Future[None]) -> None:
        if outcome.exception() is None:
            with self._lock:
                self._committed = max(self._committed, number)
                self._paths.pop(number, None)
            self._delete_what_is_due()
        else:
            self._fail(number)

    def _fail(self, number: int) -> None:
        with self._lock:
            self._failed.add(number)
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                self._await(each)

    def _delete_what_is_due(self) -> None:
        with self._lock:  # wait() comes behind what is submitted here
            due = [each.action for each in self._waiting if each.number <= self._committed]
            self._waiting = [each for each in self._waiting if each.number > self._committed]
            for action in due:
                self._deletions.request(action)
