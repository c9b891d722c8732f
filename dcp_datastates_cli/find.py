"""``dcp-datastates latest``."""

from __future__ import annotations

import argparse
import sys

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
    if len(roots) == 1:
        found = latest(options.root[0], verify=options.verify)
        places = [] if found is None else [found]
    else:
        places = latest(list(options.root), verify=options.verify) or []
    if options.json:
        found = places[0] if places else None
        step = None if found is None else step_of(found.name)
        answer = {"root": roots[0], "latest": found, "step": step}
        print_json(answer if len(roots) == 1 else {**answer, "tiers": roots, "places": places})
    elif places:
        with pipe_may_close():
            for place in places:
                # A program that reads it wants the path as it is.
                print(printable(place) if sys.stdout.isatty() else place)
    else:
        for root in roots:
            there = (
                "no whole checkpoint in it" if is_directory(root) else "there is no such directory"
            )
            complain(f"{root}: {there}")
    return OK if places else NO
