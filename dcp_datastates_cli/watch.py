"""``dcp-datastates watch``: the newest checkpoints of a directory, as they come."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from dcp_datastates.checkpoints.describe import Listed, newest
from dcp_datastates.checkpoints.inventory import is_directory
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage.object_path import Location, locate
from dcp_datastates.text import columns, date, duration, numbers, printable, size
from dcp_datastates_cli.output import OK, pipe_may_close


def run(options: argparse.Namespace) -> int:
    """Show ``options.root`` until an interrupt, or until the reader of a pipe has gone."""
    root = locate(options.root)
    if not is_directory(root):
        raise ConfigurationError(f"there is no directory {str(root)!r}")
    if not 0 < options.every < 86400 or options.rows < 1:
        raise ConfigurationError(
            "--every must be more than 0 seconds and less than a day, and --rows 1 or more"
        )
    if sys.stdout.isatty() and not options.json:
        _show(root, options.every, options.rows)
    else:
        with pipe_may_close():
            _tell(root, options.every, options.json)
    return OK


def next_commit(committed: Sequence[Listed]) -> float | None:
    """When the next commit is due, in seconds since the epoch, if the commits go on as they have; None if unknown.

    ``committed``: the newest first.
    """
    times = [each.committed_at for each in committed if each.committed_at is not None]
    if len(times) < 2:
        return None
    return times[0] + median(newer - older for newer, older in pairwise(times))


def _tell(root: Location, every: float, as_json: bool) -> None:
    """A line for each commit, the ones that are there first."""
    told: set[str | None] = set()
    while True:
        committed, _ = newest(root, sys.maxsize if not told else 16)
        for each in reversed(committed):
            if each.attempt not in told:
                told.add(each.attempt)
                said = dataclasses.asdict(each)
                line = json.dumps(said, default=str) if as_json else printable(_line(each))
                print(line, flush=True)
        time.sleep(every)


def _line(each: Listed) -> str:
    nbytes = "" if each.nbytes is None else size(each.nbytes)
    parts = (date(each.committed_at), each.name, nbytes, numbers(each.metrics), each.problem)
    return "  ".join(filter(None, parts))


def _show(root: Location, every: float, rows: int) -> None:
    from rich.live import Live  # here: no other command needs it
    from rich.text import Text

    with Live(auto_refresh=False, screen=False) as live:
        while True:
            committed, open_saves = newest(root, rows)
            due = next_commit(committed)
            lines = [str(root), *table(committed, open_saves, due, time.time())]
            live.update(Text(printable("\n".join(lines)), no_wrap=True), refresh=True)
            time.sleep(every)


def table(
    committed: Sequence[Listed], open_saves: Sequence[Listed], due: float | None, now: float
) -> list[str]:
    """Saves without a commit, and the newest checkpoints with their age and distance, as lines."""
    rows: list[tuple[object, ...]] = [
        (each.name, each.step, None, None, None, None, None, each.problem) for each in open_saves
    ]
    times = [each.committed_at for each in committed]
    for each, before in zip(committed, [*times[1:], None], strict=True):
        at = each.committed_at
        rows.append(
            (
                each.name,
                each.step,
                None if each.nbytes is None else size(each.nbytes),
                date(at),
                None if at is None else duration(max(0.0, now - at)),
                None if at is None or before is None else duration(max(0.0, at - before)),
                numbers(each.metrics),
                each.problem,
            )
        )
    headers = ("checkpoint", "step>", "size>", "committed", "age>", "after>", "metrics", "")
    lines = columns(headers, rows)
    if due is not None:
        late = f"{duration(now - due)} late" if now > due else f"in {duration(due - now)}"
        lines.append(f"  next commit: {late}")
    return lines
