"""The arguments of the command line, and where a command begins. Must not import torch, so nothing that does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["main"]

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, or exits with it on wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        # Imports torch, which takes seconds: not before it is known that a command is to run.
        from dcp_datastates_cli.commands import run

        return run(options)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcp-datastates", description="Look after checkpoints that dcp_datastates has written."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_verify(commands)
    _add_inspect(commands)
    _add_latest(commands)
    _add_retain(commands)
    _add_rm(commands)
    _add_pin(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _version() -> str:
    try:
        return version("dcp_datastates")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0+unknown"


def _add_verify(commands: _Commands) -> None:
    verify = commands.add_parser(
        "verify",
        help="read every stored byte and compare it with its checksum",
        description="Check every stored byte of a checkpoint, or of all checkpoints in a directory, and that "
        "the parts of each agree. Exit status: 0 whole, 1 damaged, 2 nothing to check or it cannot be read.",
    )
    verify.add_argument("path", metavar="PATH", help="a checkpoint, or a directory of checkpoints")
    verify.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="how many read at a time (default: cores, 8 at most)",
    )
    verify.add_argument("--quiet", action="store_true", help="print damage only, no progress bar")


def _add_inspect(commands: _Commands) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="say what is in a checkpoint, or list a directory of checkpoints",
        description="Say what is in a checkpoint, or list a directory of checkpoints. "
        "Only the metadata are read. Exit status: 0 described, 1 the metadata are damaged, "
        "2 no checkpoint or it cannot be read.",
    )
    inspect.add_argument("path", metavar="PATH", help="a checkpoint, or a directory of checkpoints")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor and object")


def _add_latest(commands: _Commands) -> None:
    latest = commands.add_parser(
        "latest",
        help="print the path of the newest whole checkpoint",
        description="Print the path of the newest checkpoint in a directory that passes --verify; say which "
        "are left out, and why. Exit status: 0 found, 1 there is none, 2 the directory cannot be read.",
    )
    latest.add_argument("root", metavar="ROOT", help="a directory of checkpoints")
    _add_level(latest)


def _add_retain(commands: _Commands) -> None:
    retain = commands.add_parser(
        "retain",
        help="delete old checkpoints by rules",
        description="Delete the checkpoints in a directory that are older than the N newest good ones (those that "
        "pass --verify), unless another option or a pin keeps them. The last good one is never deleted, nor one that a "
        "save is replacing, nor anything that is not a checkpoint of this package. "
        "Exit status: 0 done, 2 wrong usage or the system refused.",
    )
    retain.add_argument("root", metavar="ROOT", help="a directory of checkpoints")
    retain.add_argument(
        "--keep", type=int, required=True, metavar="N", help="how many good ones stay, 1 or more"
    )
    retain.add_argument(
        "--every",
        type=int,
        metavar="STEPS",
        help="keep those whose step is a multiple of this, too",
    )
    retain.add_argument(
        "--best",
        metavar="METRIC:min|max[:N]",
        help='keep the best N, too: "loss:min", "accuracy:max:3"',
    )
    retain.add_argument(
        "--within", metavar="TIME", help='keep those of this time, too: "36h", "7d"'
    )
    _add_level(retain)
    _add_dry_run(retain)


def _add_rm(commands: _Commands) -> None:
    rm = commands.add_parser(
        "rm",
        help="delete checkpoints",
        description="Delete checkpoints, after asking on a terminal. Foreign files in their directories stay. "
        "Nothing is deleted if one of the paths is not a checkpoint. "
        "Exit status: 0 deleted, 1 the answer was not yes, 2 no checkpoint or the system refused.",
    )
    rm.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint")
    rm.add_argument("-y", "--yes", action="store_true", help="do not ask")
    _add_dry_run(rm)


def _add_pin(commands: _Commands) -> None:
    for command, what in (("pin", "keep a checkpoint from deletion"), ("unpin", "let it go again")):
        added = commands.add_parser(
            command, help=what, description=f"{what.capitalize()}. Exit status: 0 done, 2 refused."
        )
        added.add_argument("path", metavar="PATH", help="a checkpoint")
        added.add_argument("--name", default="keep", help='what the pin is for, such as "eval"')


def _add_level(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--verify",
        choices=("metadata", "structure", "full"),
        default="structure",
        help="what a checkpoint must pass: its metadata can be read; and every file is there with its size (the "
        "default); and every stored byte matches its checksum",
    )


def _add_dry_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-n", "--dry-run", action="store_true", help="say what would be deleted, delete nothing"
    )
