"""Describes a directory of checkpoints: what is there, what is in flight, and what has failed."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from dcp_datastates.checkpoints.find import flaw
from dcp_datastates.checkpoints.listing import Found, directories, newest_first
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.errors import DataStatesError, ForeignCheckpointError, StorageError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.storage import attempts, decisions
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.job_notes import Note, note_in
from dcp_datastates.storage.object_path import Location, stored
from dcp_datastates.text import columns, date, numbers, size, step_of

_SHOWN: Final = 16

_REPLACED: Final = 8
"""Of how many checkpoints, the newest, it is looked whether a save replaces them."""


State = Literal["undecided", "withdrawn", "replaced", "deleted"]
"""Of an attempt that is not the checkpoint at its path. Undecided: its save is in flight, or was abandoned."""

_STATES: Final[dict[decisions.State | None, State]] = {
    None: "undecided",
    decisions.State.WITHDRAWN: "withdrawn",
    decisions.State.COMMITTED: "replaced",
    decisions.State.DELETED: "deleted",
}


@dataclass(frozen=True)
class UncommittedAttempt:
    """The files of a save that is still running, or has failed."""

    attempt: str
    state: State
    files: int
    nbytes: int
    written_at: float | None
    """The latest change of a file; None while there is none. A store shows a file when all of it is there."""


def uncommitted_at(
    directory: Location, committed: Attempt | None = None
) -> tuple[UncommittedAttempt, ...]:
    """The attempts at ``directory`` but the ``committed`` one, oldest first. Raises :class:`StorageError`."""
    others = [attempt for attempt in attempts.present(directory) if attempt != committed]
    return tuple(
        UncommittedAttempt(
            attempt.name,
            _STATES[decisions.state_of(directory, attempt)],
            len(contents.data),
            sum(each.nbytes for each in contents.data),
            max((each.modified_at for each in contents.data), default=None),
        )
        for attempt, contents in sorted(attempts.survey(directory, others).items())
    )


@dataclass(frozen=True)
class Listed:
    """One entry of a directory of checkpoints."""

    name: str
    step: int | None
    format: Literal["dcp_datastates", "other"]
    committed: bool
    attempt: str | None = None
    """The committed attempt; for an uncommitted checkpoint, the newest."""
    nbytes: int | None = None
    ranks: int | None = None
    committed_at: float | None = None
    problem: str | None = None
    """Why :func:`~dcp_datastates.latest` would skip it."""
    unjudged: bool = False
    """Whether storage does not show what is there: ``latest`` raises, and ``retain`` deletes nothing that is older."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    in_flight: bool = False
    """Whether the attempt has no outcome: it is in flight, or was abandoned."""
    written_at: float | None = None
    """Then, as :attr:`UncommittedAttempt.written_at`."""


@dataclass(frozen=True)
class Directory:
    """A directory of checkpoints: those of this package from newest to oldest, then all others."""

    path: Location
    latest: str | None
    """The name of the checkpoint that :func:`~dcp_datastates.latest` returns."""
    checkpoints: tuple[Listed, ...] = field(repr=False)
    failure: Note | None = None
    """The last save there that failed, as its job has noted it."""
    failure_is_past: bool = False
    """Whether a later save is committed."""
    free_nbytes: int | None = None
    """What a save may still take there; None in a store."""

    @property
    def newest(self) -> Listed | None:
        """The checkpoint with the name :attr:`latest`."""
        return next((each for each in self.checkpoints if each.name == self.latest), None)

    def __str__(self) -> str:
        """As :meth:`table`, with the first checkpoints."""
        return "\n".join([str(self.path), *self.table(_SHOWN)])

    def table(self, most: int | None) -> list[str]:
        """A line for each of ``most`` checkpoints (None: all), with the note whether it is the latest, or why not."""
        rows = [
            (
                each.name,
                each.step,
                date(each.committed_at) or _said(each),
                None if each.nbytes is None else size(each.nbytes),
                numbers(each.metrics),
                self._note(each),
            )
            for each in self.checkpoints
        ]
        headers = ("checkpoint", "step>", "committed", "size>", "metrics", "")
        return columns(headers, rows, most)

    def _note(self, each: Listed) -> str:
        notes = ["latest" if each.name == self.latest else each.problem]
        if each.pins:
            notes.append(f"pinned: {', '.join(each.pins)}")
        return "; ".join(filter(None, notes))


def _said(each: Listed) -> str:
    if each.committed:
        return "yes"
    return "unknown" if each.unjudged else "no"


def overview(root: Location) -> Directory:
    """What is in ``root``. Raises :class:`StorageError` if it cannot be read."""
    everything = directories(root)
    ours = [_listed(found) for found in newest_first(everything)]
    names = {each.name for each in ours}
    replacing = (each for old in ours[:_REPLACED] for each in _open_saves(root / old.name, old))
    others = _others(path for path in everything if path.name not in names)
    first = next((each for each in ours if each.problem is None or each.unjudged), None)
    failure = note_in(root)
    free = None
    with contextlib.suppress(OSError):
        if stored(root).is_local:
            status = os.statvfs(str(root))
            free = status.f_bavail * status.f_frsize
    return Directory(
        path=root,
        latest=None if first is None or first.unjudged else first.name,
        checkpoints=(*ours, *replacing, *others),
        failure=failure,
        failure_is_past=failure is not None
        and any((each.committed_at or 0.0) > (failure.at or math.inf) for each in ours),
        free_nbytes=free,
    )


def ranks_of(paths: Iterable[str]) -> int:
    """How many ranks have written the data files at ``paths``."""
    return len(set(map(attempts.rank_of, paths)) - {None})


def _listed(found: Found) -> Listed:
    unjudged = False
    try:
        problem = flaw([found], "structure")
        pinned = pins(found.path)
    except StorageError as error:
        problem, pinned, unjudged = str(error), (), True
    committed = found.committed
    return Listed(
        name=found.path.name,
        step=step_of(found.path.name),
        format="dcp_datastates",
        committed=found.error is None,
        attempt=None if found.error is not None else found.attempt.name,
        nbytes=None if committed is None else committed.nbytes,
        ranks=None if committed is None else ranks_of(committed.note.files),
        committed_at=None if committed is None else committed.committed_at,
        problem=problem,
        unjudged=unjudged,
        metrics=found.metrics,
        pins=pinned,
    )


def _others(paths: Iterable[Location]) -> Iterator[Listed]:
    """The uncommitted saves and other programs' checkpoints among the directories ``paths``."""
    for path in paths:
        name, step = path.name, step_of(path.name)
        try:
            if attempts.is_taken(path):
                open_committed(path)
        except ForeignCheckpointError:
            yield Listed(name, step, "other", True, problem="a stock DCP checkpoint")
        except StorageError as error:
            yield Listed(name, step, "other", False, problem=str(error), unjudged=True)
        except DataStatesError as error:
            yield Listed(name, step, "other", True, problem=str(error))
        else:
            yield from _open_saves(path)


def _open_saves(path: Location, committed: Listed | None = None) -> Iterator[Listed]:
    """The newest attempt at ``path``; if one is ``committed``, a newer one in flight. None if storage does not tell."""
    attempt = None if committed is None else Attempt.parse(committed.attempt or "")
    with contextlib.suppress(StorageError):
        for each in uncommitted_at(path, attempt)[-1:]:
            is_open = each.state == "undecided"
            if committed is not None and not (is_open and each.attempt > (committed.attempt or "")):
                continue
            yield Listed(
                name=path.name,
                step=step_of(path.name),
                format="dcp_datastates",
                committed=False,
                attempt=each.attempt,
                problem=f"not committed: {'in flight or abandoned' if is_open else each.state}",
                in_flight=is_open,
                written_at=each.written_at,
            )
