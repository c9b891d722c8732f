"""``dcp-datastates latest``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dcp_datastates.checkpoints.find import latest
from dcp_datastates.checkpoints.inventory import is_directory
from dcp_datastates.storage.object_path import locate
from dcp_datastates.text import printable, step_of
from dcp_datastates_cli.output import NO, OK, complain, pipe_may_close, print_json


def run(options: argparse.Namespace) -> int:
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
