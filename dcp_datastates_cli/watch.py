"""``dcp-datastates watch``: the newest checkpoints of a directory, as they come."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

from dcp_datastates.checkpoints.inventory import is_directory
from dcp_datastates.checkpoints.overview import Listed, overview
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage.object_path import Location, locate
from dcp_datastates.text import date, numbers, printable, size
from dcp_datastates_cli.output import OK, pipe_may_close
from dcp_datastates_cli.screen import screen


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


def _tell(root: Location, every: float, as_json: bool) -> None:
    """A line for each commit, the ones that are there first."""
    told: set[str | None] = set()
    while True:
        listed = overview(root, sys.maxsize if not told else 16).checkpoints
        for each in reversed(listed):
            if each.committed and each.attempt not in told:
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
            text = printable(screen(overview(root, rows), time.time(), rows))
            live.update(Text(text, no_wrap=True), refresh=True)
            time.sleep(every)
