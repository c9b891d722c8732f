"""``dcp-datastates latest``."""

from __future__ import annotations

import argparse
import sys

from dcp_datastates.checkpoints.find import latest
from dcp_datastates.checkpoints.inventory import is_directory
from dcp_datastates.checkpoints.listing import step_of
from dcp_datastates.storage.object_path import locate
from dcp_datastates.text import printable
from dcp_datastates_cli.output import NO, OK, complain, pipe_may_close, print_json

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Print the path of the newest checkpoint in ``options.root``; returns the exit status."""
    root = locate(options.root)
    found = latest(options.root, verify=options.verify)
    if options.json:
        step = None if found is None else step_of(found.name)
        print_json({"root": root, "latest": found, "step": step})
    elif found is not None:
        with pipe_may_close():
            # A program that reads it wants the path as it is.
            print(printable(found) if sys.stdout.isatty() else found)
    else:
        there = "no whole checkpoint in it" if is_directory(root) else "there is no such directory"
        complain(f"{root}: {there}")
    return NO if found is None else OK
