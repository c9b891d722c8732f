"""A directory of checkpoints on one screen: what ``inspect`` and ``watch`` show."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Final

from dcp_datastates.checkpoints.overview import Directory, Listed
from dcp_datastates.text import date, duration, printable, size

_WIDTH: Final = 80
_LABEL: Final = 16
_HEIGHT: Final = 23
"""Of a terminal with 24 lines, one is the prompt's."""
_LEAST_ROWS: Final = 4
_MOST_SAVES: Final = 3
"""How many saves in flight are named."""
_MOST_LINES: Final = 5
"""Of one entry: an error may be long."""
_QUIET_SECONDS: Final = 600.0
"""A save that has written nothing for so long is probably no longer in flight."""


def next_commit(listed: Sequence[Listed]) -> float | None:
    """When the next commit is due, in seconds since the epoch, if the commits go on as they have; None if unknown.

    ``listed``: the newest first.
    """
    times = [each.committed_at for each in listed if each.committed_at is not None]
    if len(times) < 2:
        return None
    return times[0] + median(newer - older for newer, older in pairwise(times))


def free_saves(found: Directory) -> int | None:
    """How many saves as large as the newest the free space takes."""
    if found.free_nbytes is None or found.newest is None or not found.newest.nbytes:
        return None
    return found.free_nbytes // found.newest.nbytes


def screen(found: Directory, now: float, rows: int | None = 0) -> str:
    """The text, in 80 columns. ``rows``: how many checkpoints are listed (0: as many as fit; None: all)."""
    lines = [str(found.path)]
    for label, text in _entries(found, now):
        wrapped = textwrap.wrap(printable(text), _WIDTH - _LABEL) or [""]
        if len(wrapped) > _MOST_LINES:
            wrapped[_MOST_LINES - 1 :] = ["… (--json shows all of it)"]
        lines += [f"  {label:{_LABEL - 2}}{wrapped[0]}"]
        lines += [" " * _LABEL + each for each in wrapped[1:]]
    if rows == 0:
        rows = max(_LEAST_ROWS, _HEIGHT - len(lines) - 3)
    others = tuple(each for each in found.checkpoints if not each.in_flight)
    return "\n".join([*lines, "", *replace(found, checkpoints=others).table(rows)])


def _entries(found: Directory, now: float) -> Iterator[tuple[str, str]]:
    newest, failure = found.newest, found.failure
    if newest is None:
        yield "newest", "none that can be loaded"
    elif newest.committed_at is not None:
        age, at = duration(max(0.0, now - newest.committed_at)), date(newest.committed_at)
        yield "newest", f"{newest.name}, age {age}, committed {at}"
    if (due := next_commit(found.checkpoints)) is not None:
        late = f"{duration(now - due)} late" if now > due else f"in {duration(due - now)}"
        yield "next commit", f"{late}, if saves go on as before"
    saves = [each for each in found.checkpoints if each.in_flight]
    if failure is not None:
        saves = [each for each in saves if each.attempt != failure.attempt]
    yield "in flight", "; ".join(_of_save(each, now) for each in saves[:_MOST_SAVES]) or "nothing"
    if failure is not None:
        since = "a later save is committed" if found.failure_is_past else None
        when = None if failure.at is None else f"{duration(max(0.0, now - failure.at))} ago"
        yield "last failure", _joined(failure.checkpoint, when, failure.by, since)
        yield "", failure.error or "unknown"
    if (job := found.retention) is not None:
        yield "next deleted", job.error or _joined(*(found.deletes_next or ["nothing"]))
        given = {name: rule for name, rule in (job.rules or {}).items() if rule is not None}
        rules = ", ".join(f"{name}={rule!r}" for name, rule in given.items() if name != "prefix")
        yield (
            "",
            _joined(f"Keep({rules})" if rules else "all stay", job.by, f"since {date(job.at)}"),
        )
    if found.free_nbytes is not None:
        count = free_saves(found)
        room = "" if count is None else f": room for {count} saves like the newest"
        yield "free space", f"{size(found.free_nbytes)}{room}"


def _of_save(save: Listed, now: float) -> str:
    if save.written_at is None:
        return f"{save.name}, in flight or abandoned: no file of it is there"
    quiet = max(0.0, now - save.written_at)
    state = "abandoned, it seems" if quiet > _QUIET_SECONDS else "in flight or abandoned"
    return f"{save.name}, {state}: last write {duration(quiet)} ago"


def _joined(*parts: str | None) -> str:
    return ", ".join(filter(None, parts))
