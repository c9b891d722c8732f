"""``dcp-datastates inspect``: what is in a checkpoint, or in a directory of checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

from dcp_datastates.checkpoints.describe import Checkpoint, inspect
from dcp_datastates.checkpoints.overview import Directory
from dcp_datastates_cli.output import DAMAGED, OK, TROUBLE, print_json, say
from dcp_datastates_cli.screen import free_saves, next_commit, screen


def run(options: argparse.Namespace) -> int:
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
