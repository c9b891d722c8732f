"""``dcp-datastates verify``: one checkpoint, or all in a directory."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from dcp_datastates.checkpoints.inventory import is_directory, may_be_committed
from dcp_datastates.checkpoints.listing import committed_among, directories
from dcp_datastates.checkpoints.verify import Report, verify
from dcp_datastates.errors import ConfigurationError, DataStatesError, ForeignCheckpointError
from dcp_datastates.process.progress_bar import progress_bar
from dcp_datastates.storage import attempts
from dcp_datastates.storage.object_path import Location, ObjectPath, locate
from dcp_datastates.text import count
from dcp_datastates_cli.output import DAMAGED, OK, TROUBLE, answer, complain, print_json, say


def run(options: argparse.Namespace) -> int:
    """Verify what is at ``options.path``; returns the exit status."""
    path = locate(options.path)
    below = _without_links(_below(path)) if is_directory(path) else []
    if below:
        return _verify_all(path, [path, *below] if attempts.is_taken(path) else below, options)
    report = _verify(path, options)
    if options.json:
        print_json(_document(report))
    return OK if report.whole else DAMAGED


def _below(path: Location) -> list[Location]:
    """The checkpoints in a directory; also what cannot be judged, of which its own check says why."""
    if isinstance(path, ObjectPath):
        return committed_among(directories(path))
    return [each for each in directories(path) if may_be_committed(each)]


def _without_links(paths: list[Location]) -> list[Location]:
    """Leave out links to others of the checkpoints: their bytes need not be read twice."""
    real = {path for path in paths if not path.is_symlink()}
    return [
        path
        for path in paths
        if path in real or isinstance(path, ObjectPath) or path.resolve() not in real
    ]


def _verify_all(root: Location, paths: list[Location], options: argparse.Namespace) -> int:
    reports: list[Report] = []
    unchecked: list[tuple[Location, DataStatesError]] = []
    for path in paths:
        try:
            reports.append(_verify(path, options))
        except ConfigurationError:  # an option is wrong, not a checkpoint
            raise
        except DataStatesError as error:
            unchecked.append((path, error))
            complain(f"not checked: {error}")
    damaged = sum(not report.whole for report in reports)
    answer(
        options,
        {
            "kind": "directory",
            "path": root,
            "whole": not damaged,
            "checkpoints": list(map(_document, reports)),
            "unchecked": [{"path": path, "problem": str(error)} for path, error in unchecked],
        },
        f"{count(len(paths), 'checkpoint')} in {root}: {len(reports) - damaged} whole, {damaged} damaged, "
        f"{len(unchecked)} not checked",
    )
    if damaged:
        return DAMAGED
    foreign = (isinstance(error, ForeignCheckpointError) for _, error in unchecked)
    return OK if reports and all(foreign) else TROUBLE


def _verify(path: Location, options: argparse.Namespace) -> Report:
    """Verify, and tell the report; with ``--quiet`` its damages alone, and nothing if a JSON document is to come."""
    with progress_bar("verifying", path.name, options.quiet) as progress:
        report = verify(path, threads=options.threads, progress=progress)
    if options.quiet and not options.json:
        for damage in report.damages:
            say(f"{report.path}/{damage}")
    elif not options.json:
        say(report)
    return report


def _document(report: Report) -> dict[str, Any]:
    return {"kind": "checkpoint", **dataclasses.asdict(report), "whole": report.whole}
