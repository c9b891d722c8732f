"""``dcp-datastates retain``, ``delete``, ``pin`` and ``unpin``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dcp_datastates.checkpoints.delete import delete
from dcp_datastates.checkpoints.describe import inspect
from dcp_datastates.checkpoints.inventory import is_directory
from dcp_datastates.checkpoints.keep import Keep
from dcp_datastates.checkpoints.overview import Directory
from dcp_datastates.checkpoints.pins import pin, pins, unpin
from dcp_datastates.checkpoints.retention import retain_here
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    DataStatesError,
)
from dcp_datastates.storage.object_path import Location, ObjectPath, locate
from dcp_datastates.text import count, date, printable, size
from dcp_datastates_cli.output import NO, OK, TROUBLE, answer, complain, print_json, say


def run_retain(options: argparse.Namespace) -> int:
    """Delete old checkpoints in ``options.root``; returns the exit status."""
    root = locate(options.root)
    if not is_directory(root):
        raise ConfigurationError(f"root={str(root)!r} is no directory; pass one of checkpoints")
    Keep.of(options.keep)
    keep = Keep(options.keep, options.every, _best(options.best), options.within)
    retained = retain_here(root, keep=keep, verify=options.verify, dry_run=options.dry_run)
    kept, deleted = _words(options)
    lines = [f"{kept} {path}" for path in retained.kept]
    lines += [f"{deleted} {path}" for path in retained.deleted]
    document = {"kept": retained.kept, "deleted": retained.deleted}
    answer(options, {"root": root, "dry_run": options.dry_run, **document}, "\n".join(lines))
    return OK


def _words(options: argparse.Namespace) -> tuple[str, str]:
    return ("would keep", "would delete") if options.dry_run else ("kept", "deleted")


def run_pin(options: argparse.Namespace) -> int:
    """Pin or unpin the checkpoint at ``options.path``; returns the exit status."""
    change = pin if options.command == "pin" else unpin
    change(options.path, options.name)
    names = pins(locate(options.path))
    said = f"{options.path}: {'pinned: ' if names else 'not pinned'}{', '.join(names)}"
    answer(options, {"path": options.path, "pins": names}, said)
    return OK


def _best(given: str | None) -> Any:
    if given is None:
        return None
    name, _, rest = given.partition(":")
    direction, _, number = rest.partition(":")
    if number and not number.isdigit():
        raise ConfigurationError(f"--best {given}: {number!r} is no number of checkpoints")
    return (name, direction, int(number)) if number else (name, direction)


def run_delete(options: argparse.Namespace) -> int:
    """Delete the checkpoints at ``options.paths``; returns the exit status."""
    paths = list(dict.fromkeys(map(locate, options.paths)))
    # All are looked at before any is deleted: a word too many in the command deletes nothing.
    found = [f"{path} ({_what_is_at(path)})" for path in paths]
    if not (options.dry_run or options.yes):
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            complain("nothing is deleted without a terminal to ask on; pass --yes, or --dry-run")
            return TROUBLE
        if not _is_confirmed(found):
            complain("nothing was deleted")
            return NO
    deleted, failed = [], []
    for path, description in zip(paths, found, strict=True):
        try:
            if not options.dry_run:
                delete(path)
        except DataStatesError as error:
            complain(str(error))
            failed.append({"path": path, "problem": str(error)})
            continue
        deleted.append(path)
        if not options.json:
            say(f"{_words(options)[1]} {description}")
    if options.json:
        print_json({"dry_run": options.dry_run, "deleted": deleted, "failed": failed})
    return TROUBLE if failed else OK


def _what_is_at(path: Location) -> str:
    if not isinstance(path, ObjectPath) and path.is_symlink():
        raise ConfigurationError(
            f"{path} is a symbolic link; name the checkpoint that it points to: {path.resolve()}"
        )
    try:
        found = inspect(path)
    except CheckpointCorruptError:
        return "its metadata are damaged"
    if isinstance(found, Directory):
        raise CheckpointNotFoundError(f"{path} is a directory of checkpoints; name some of them")
    files = count(len(found.files), "file")
    committed = f"committed {date(found.committed_at)}, {size(found.nbytes)} in {files}"
    return committed if found.committed else "not committed"


def _is_confirmed(found: list[str]) -> bool:
    lines = "".join(f"  {each}\n" for each in found)
    question = f"{printable(lines)}Delete {count(len(found), 'checkpoint')}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
