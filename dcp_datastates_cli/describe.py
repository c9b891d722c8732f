"""``dcp-datastates inspect``, ``trace`` and ``latest``: what reads names and metadata alone."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final

from dcp_datastates.checkpoints.describe import Checkpoint, inspect
from dcp_datastates.checkpoints.find import latest
from dcp_datastates.checkpoints.inventory import is_directory
from dcp_datastates.checkpoints.overview import Directory, Listed
from dcp_datastates.monitoring.trace import chrome_trace, trace_of
from dcp_datastates.results import SaveRecord
from dcp_datastates.storage.object_path import locate
from dcp_datastates.text import columns, count, date, duration, printable, size, step_of
from dcp_datastates_cli.output import (
    DAMAGED,
    NO,
    OK,
    TROUBLE,
    answer,
    complain,
    pipe_may_close,
    print_json,
    say,
)

_WIDTH, _HEIGHT = 80, 23  # of a terminal with 24 lines, one is the prompt's
_LEAST_ROWS: Final = 4
_MOST_LINES: Final = 5  # of one entry: an error may be long
_QUIET_SECONDS: Final = 600.0  # a save that has written nothing for so long is probably abandoned


def run_latest(options: argparse.Namespace) -> int:
    """Print the path of the newest checkpoint in ``options.root``; of several tiers, all its places, the nearest first.
    Returns the exit status.
    """
    roots = [locate(root) for root in options.root]
    places = latest(list(options.root), verify=options.verify) or []
    if options.json:
        nearest = places[0] if places else None
        step = None if nearest is None else step_of(nearest.name)
        document: dict[str, Any] = {"root": roots[0], "latest": nearest, "step": step}
        if len(roots) > 1:
            document |= {"tiers": roots, "places": places}
        print_json(document)
    elif places:
        with pipe_may_close():
            for place in places:
                # A program that reads it wants the path as it is.
                print(printable(place) if sys.stdout.isatty() else place)
    else:
        for root in roots:
            there = "there is no such directory"
            if is_directory(root):
                there = "no whole checkpoint in it"
            complain(f"{root}: {there}")
    return OK if places else NO


# ---- trace ---------------------------------------------------------------------------------------


def run_trace(options: argparse.Namespace) -> int:
    """Say what the save of the checkpoint at ``options.path`` cost; returns the exit status."""
    records = trace_of(options.path)
    answer(options, chrome_trace(records), "\n".join(_summary(records)))
    return OK


def _summary(records: Sequence[SaveRecord]) -> list[str]:
    written = sum(record.written_bytes for record in records)
    ended = max(record.began_at + record.seconds for record in records)
    whole = ended - min(record.began_at for record in records)
    rows = [
        _row(phase, [record.phases[phase] for record in records]) for phase in records[0].phases
    ]
    rows.append(_row("stall of training", [record.stall_seconds for record in records]))
    return [
        f"{records[0].path}: {count(len(records), 'rank')}, {size(written)}, {duration(whole)} until its publication",
        *columns(("phase", "median>", "slowest>", "its rank>"), rows),
    ]


def _row(name: str, seconds: Sequence[float]) -> tuple[str, str, str, int]:
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return name, duration(median(seconds)), duration(seconds[slowest]), slowest


# ---- inspect -------------------------------------------------------------------------------------


def run_inspect(options: argparse.Namespace) -> int:
    """Say what is at ``options.path``; returns the exit status."""
    found = inspect(options.path)
    unjudged = isinstance(found, Directory) and any(each.unjudged for each in found.checkpoints)
    if options.json:  # of many tensors, each takes a while
        print_json(_document(found, options.tensors))
    elif isinstance(found, Directory):
        say(screen(found, time.time(), None if options.all else 0))
    else:
        say(found.text(None if options.tensors else 0))
    return DAMAGED if _is_damaged(found) else TROUBLE if unjudged else OK


def _is_damaged(found: Checkpoint | Directory) -> bool:
    if isinstance(found, Directory):
        ours = [each for each in found.checkpoints if each.format == "dcp_datastates"]
        return any(each.committed and each.problem for each in ours)
    return any(file.problem for file in found.files)


def _document(found: Checkpoint | Directory, tensors: bool) -> dict[str, Any]:
    if isinstance(found, Directory):
        more = {"free_saves": free_saves(found), "next_commit": next_commit(found.checkpoints)}
        return {"kind": "directory", **dataclasses.asdict(found), **more}
    document = {
        "kind": "checkpoint",
        **dataclasses.asdict(found),
        "tensor_count": len(found.tensors),
        "object_count": len(found.objects),
    }
    if not tensors:
        document["tensors"] = document["objects"] = None
    return document


# ---- a directory on a screen ---------------------------------------------------------------------


def next_commit(listed: Sequence[Listed]) -> float | None:
    """When the next commit is due, in seconds since the epoch, by ``listed``, the newest first; None if unknown."""
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
    lines, failed = [str(found.path)], None if found.failure is None else found.failure.attempt
    for label, text in _entries(found, failed, now):
        lines += textwrap.wrap(
            printable(text),
            _WIDTH,
            initial_indent=f"  {label:14}",
            subsequent_indent=" " * 16,
            max_lines=_MOST_LINES,
            placeholder=" … (--json shows all of it)",
        )
    if rows == 0:
        rows = max(_LEAST_ROWS, _HEIGHT - len(lines) - 3)
    said = [each for each in found.checkpoints if each.in_flight or each.attempt == failed]
    others = tuple(each for each in found.checkpoints if each.committed or each not in said)
    table = dataclasses.replace(found, checkpoints=others).table(rows)
    return "\n".join([*lines, "", *table])


def _entries(found: Directory, failed: str | None, now: float) -> Iterator[tuple[str, str]]:
    newest, failure = found.newest, found.failure
    if newest is None or newest.committed_at is None:
        yield "newest", "none that can be loaded"
    else:
        age, at = duration(max(0.0, now - newest.committed_at)), date(newest.committed_at)
        yield "newest", f"{newest.name}, age {age}, committed {at}"
    if (due := next_commit(found.checkpoints)) is not None:
        late = f"{duration(now - due)} late" if now > due else f"in {duration(due - now)}"
        yield "next commit", f"{late}, if saves go on as before"
    saves = [each for each in found.checkpoints if each.in_flight and each.attempt != failed]
    yield "in flight", "; ".join(_of_save(each, now) for each in saves) or "nothing"
    if failure is not None:
        since = "a later save is committed" if found.failure_is_past else None
        when = None if failure.at is None else f"{duration(max(0.0, now - failure.at))} ago"
        about = filter(None, (failure.checkpoint, when, failure.by, since))
        yield "last failure", ", ".join(about) or "unknown"
        yield "", failure.error or "the disk was full, so that the note has the time alone"
    if found.free_nbytes is not None:
        count = free_saves(found)
        room = "" if count is None else f": room for {count:,} saves like the newest"
        yield "free space", f"{size(found.free_nbytes)}{room}"


def _of_save(save: Listed, now: float) -> str:
    if save.written_at is None:
        return f"{save.name}, in flight or abandoned: no file of it is there"
    quiet = max(0.0, now - save.written_at)
    state = "abandoned, it seems" if quiet > _QUIET_SECONDS else "in flight or abandoned"
    return f"{save.name}, {state}: last write {duration(quiet)} ago"
