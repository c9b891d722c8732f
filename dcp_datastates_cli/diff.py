"""``dcp-datastates diff``: what two checkpoints differ in."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

from dcp_datastates.conversion.compare import Comparison, diff
from dcp_datastates.errors import CheckpointCorruptError
from dcp_datastates.storage.object_path import locate
from dcp_datastates_cli.convert import prefixes
from dcp_datastates_cli.output import NO, OK, TROUBLE, complain, print_json, say
from dcp_datastates_cli.progress_bar import progress_bar

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Compare ``options.a`` with ``options.b``; returns the exit status."""
    try:
        found = _diff(options)
    except CheckpointCorruptError as error:  # status 1 says that they differ
        complain(str(error))
        return TROUBLE
    if options.json:
        print_json(_document(found))
    elif options.quiet:
        for each in found.differences:
            say(each)
    else:
        say(found)
    return OK if found.same else NO


def _diff(options: argparse.Namespace) -> Comparison:
    with progress_bar("comparing", locate(options.a), options.quiet) as progress:
        return diff(
            options.a,
            options.b,
            only=options.only,
            rename=prefixes(options.rename),
            allow_objects=options.allow_objects,
            threads=options.threads,
            progress=progress,
        )


def _document(found: Comparison) -> dict[str, Any]:
    document = {**dataclasses.asdict(found), "same": found.same}
    for each in document["differences"]:
        for name in ("largest", "relative"):
            if each[name] is not None and math.isinf(each[name]):
                each[name] = "inf"  # JSON has no such number
    return document
