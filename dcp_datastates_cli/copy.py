"""``dcp-datastates copy``: a checkpoint, byte for byte."""

from __future__ import annotations

import argparse

from dcp_datastates.checkpoints.copy import copy
from dcp_datastates.storage.object_path import locate
from dcp_datastates_cli.output import OK, print_json, say
from dcp_datastates_cli.progress_bar import progress_bar

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Copy ``options.source`` to ``options.target``; returns the exit status."""
    source = locate(options.source)
    with progress_bar("copying", source, options.quiet) as progress:
        target = copy(source, options.target, threads=options.threads, progress=progress)
    if options.json:
        print_json({"source": source, "target": target})
    elif not options.quiet:
        say(f"{source} is copied to {target}")
    return OK
