"""The command line: ``dcp-datastates verify PATH`` and ``dcp-datastates inspect PATH``.

``python -m dcp_datastates`` is the same. Results go to the standard output, errors and the progress bar to the
standard error. Exit status of both:

====  =================================================================================
0     verify: every byte is as it was written. inspect: described.
1     the checkpoint is damaged (inspect: its metadata are)
2     usage, or there is no checkpoint of this package, or it cannot be read
130   interrupted
====  =================================================================================

``--json`` prints one JSON document. Sizes are bytes, times are seconds (of dates: since the epoch); what is not
known is null. Fields may be added, and keep their names.

``verify --json``::

    path, whole, attempt, files, nbytes, tensors, objects, seconds        files, tensors, objects: how many
    damages: [{file, offset, nbytes, problem, tensors: [name]}]           file: relative to path

``inspect --json`` of a checkpoint (tensors and objects are null without ``--tensors``)::

    kind: "checkpoint", path, committed, attempt, committed_at, nbytes, ranks, tensor_count, object_count
    files: [{path, rank, nbytes, found_nbytes}]                           path: relative to the checkpoint
    dtypes: [{dtype, tensors, nbytes}]
    tensors: [{name, shape, dtype, nbytes, chunks}]
    objects: [{name, nbytes}]
    uncommitted: [{attempt, state, files, nbytes}]                        state: in flight, abandoned, unknown

``inspect --json`` of a directory of checkpoints::

    kind: "directory", path, latest
    checkpoints: [{name, step, format, committed, attempt, nbytes, ranks, committed_at, problem}]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from dcp_datastates.checkpoints.describe import Checkpoint, Directory, describe
from dcp_datastates.checkpoints.verify import Report, verify
from dcp_datastates.damage import Damage, some_of
from dcp_datastates.errors import CheckpointCorruptError, DataStatesError

__all__ = ["main"]

_WHOLE = 0
_DAMAGED = 1
_TROUBLE = 2
_INTERRUPTED = 130

_FILES_SHOWN = 16
_PLAIN_WIDTH = 160
"""Columns of a table that is printed to no terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):  # a path may hold bytes that are no text
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except DataStatesError as error:
        with _pipe_may_close():
            print(f"dcp-datastates: {error}", file=sys.stderr, flush=True)
        return _DAMAGED if isinstance(error, CheckpointCorruptError) else _TROUBLE
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcp-datastates", description="Look after checkpoints that dcp_datastates has written."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser(
        "verify",
        help="read every stored byte and compare it with its checksum",
        description="Check every stored byte of a committed checkpoint, and that its parts agree. "
        "Exit status: 0 whole, 1 damaged, 2 nothing to check or it cannot be read.",
    )
    check.add_argument("path", metavar="PATH", help="directory of the checkpoint")
    check.add_argument("--json", action="store_true", help="print one JSON document")
    check.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="how many read at a time (default: cores, 8 at most)",
    )
    check.add_argument("--quiet", action="store_true", help="print damage only, no progress bar")
    check.set_defaults(command=_verify)

    look = commands.add_parser(
        "inspect",
        help="say what is in a checkpoint, or list a directory of checkpoints",
        description="Say what is in a checkpoint, or list a directory of checkpoints. "
        "Nothing but the metadata is read.",
    )
    look.add_argument("path", metavar="PATH", help="a checkpoint, or a directory of checkpoints")
    look.add_argument("--json", action="store_true", help="print one JSON document")
    look.add_argument("--tensors", action="store_true", help="list every tensor and object")
    look.set_defaults(command=_inspect)
    return parser


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let it through: rich would exit with 1, which here means damage."""
        raise BrokenPipeError


def _console() -> Console:
    return _Console(
        width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False, markup=False
    )


@contextlib.contextmanager
def _pipe_may_close() -> Iterator[None]:
    """Printing inside of this is cut off where nobody reads any more; the exit status stays."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is buffered must not be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(document: dict[str, Any]) -> None:
    json.dump(document, sys.stdout, indent=2, default=os.fspath)
    sys.stdout.write("\n")


# --- verify -----------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    with _progress_bar(shown=sys.stderr.isatty() and not options.quiet) as progress:
        report = verify(options.path, threads=options.threads, progress=progress)
    with _pipe_may_close():
        if options.json:
            _print_json({**dataclasses.asdict(report), "whole": report.whole})
        else:
            _print_report(report, options.quiet)
    return _WHOLE if report.whole else _DAMAGED


@contextlib.contextmanager
def _progress_bar(*, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    if not shown:
        yield None
        return
    columns = (
        TextColumn("verifying"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_report(report: Report, quiet: bool) -> None:
    console = _console()
    for damage in report.damages:
        console.print(_damage_line(damage), soft_wrap=True)
    if quiet:
        return
    if report.whole:
        verdict = "whole"
    else:
        count = len(report.damages)
        verdict = f"damaged in {count} place{'s' if count > 1 else ''}"
    console.print(
        f"{report.path}: {verdict}", style="green" if report.whole else "red", soft_wrap=True
    )
    if report.attempt is not None:
        summary = ", ".join(
            [
                _count(report.files, "file"),
                _count(report.tensors, "tensor"),
                _count(report.objects, "object"),
            ]
        )
        speed = f" in {report.seconds:.1f} s ({_size(report.nbytes / report.seconds)}/s)"
        console.print(f"  {summary}: {_size(report.nbytes)}{speed if report.whole else ''}")


def _damage_line(damage: Damage) -> str:
    where = damage.file
    if damage.offset is not None:
        where += f" at byte {damage.offset}"
        if damage.nbytes is not None:
            where += f" ({damage.nbytes} bytes)"
    line = f"{where}: {damage.problem}"
    return f"{line}; concerns {some_of(damage.tensors)}" if damage.tensors else line


# --- inspect ----------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> int:
    found = describe(options.path)
    with _pipe_may_close():
        if isinstance(found, Directory):
            if options.json:
                _print_json({"kind": "directory", **dataclasses.asdict(found)})
            else:
                _print_directory(found)
        elif options.json:
            _print_json(_checkpoint_json(found, options.tensors))
        else:
            _print_checkpoint(found, options.tensors)
    return _WHOLE


def _checkpoint_json(found: Checkpoint, tensors: bool) -> dict[str, Any]:
    document = {
        "kind": "checkpoint",
        **dataclasses.asdict(found),
        "tensor_count": len(found.tensors),
        "object_count": len(found.objects),
    }
    if not tensors:
        document["tensors"] = document["objects"] = None
    return document


def _print_directory(found: Directory) -> None:
    console = _console()
    table = _table("checkpoint", "step>", "committed", "attempt", "size>", "ranks>", "")
    for listed in found.checkpoints:
        note = "latest" if listed.name == found.latest else listed.problem or ""
        table.add_row(
            Text(listed.name),
            _or_empty(listed.step),
            _date(listed.committed_at) or ("yes" if listed.committed else "no"),
            listed.attempt or "",
            "" if listed.nbytes is None else _size(listed.nbytes),
            _or_empty(listed.ranks),
            Text(note),
        )
    console.print(table)


def _print_checkpoint(found: Checkpoint, tensors: bool) -> None:
    console = _console()
    console.print(str(found.path), style="bold", soft_wrap=True)
    if found.committed:
        objects = sum(element.nbytes for element in found.objects)
        console.print(f"  committed {_date(found.committed_at)}, attempt {found.attempt}")
        console.print(
            f"  {_size(found.nbytes)} in {_count(len(found.files), 'file')} of "
            f"{_count(found.ranks, 'rank')}: {_count(len(found.tensors), 'tensor')}, "
            f"{_count(len(found.objects), 'object')} ({_size(objects)})"
        )
    else:
        console.print("  not committed")
    if found.uncommitted:
        _print_uncommitted(console, found)
    if found.dtypes:
        table = _table("dtype", "tensors>", "size>")
        for total in found.dtypes:
            table.add_row(total.dtype, str(total.tensors), _size(total.nbytes))
        console.print(table)
    if found.files:
        _print_files(console, found)
    if tensors:
        _print_tensors(console, found)


def _print_uncommitted(console: Console, found: Checkpoint) -> None:
    table = _table("uncommitted attempt", "state", "files>", "size>")
    for attempt in found.uncommitted:
        table.add_row(attempt.attempt, attempt.state, str(attempt.files), _size(attempt.nbytes))
    console.print(table)


def _print_files(console: Console, found: Checkpoint) -> None:
    table = _table("file", "rank>", "size>", "")
    for file in found.files[:_FILES_SHOWN]:
        note = ""
        if file.found_nbytes is None:
            note = "missing"
        elif file.found_nbytes != file.nbytes:
            note = f"has {file.found_nbytes} bytes instead of {file.nbytes}"
        table.add_row(Text(file.path), _or_empty(file.rank), _size(file.nbytes), note)
    console.print(table)
    if len(found.files) > _FILES_SHOWN:
        console.print(f" … and {len(found.files) - _FILES_SHOWN} more (all with --json)")


def _print_tensors(console: Console, found: Checkpoint) -> None:
    table = _table("name", "shape", "dtype", "size>", "chunks>")
    for tensor in found.tensors:
        shape = " × ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(
            Text(tensor.name), shape, tensor.dtype, _size(tensor.nbytes), str(tensor.chunks)
        )
    for element in found.objects:
        table.add_row(Text(element.name), "", "object", _size(element.nbytes), "")
    console.print(table)


# --- words ------------------------------------------------------------------------------------


def _table(*headers: str) -> Table:
    """``>`` at a header's end aligns its column to the right."""
    table = Table(box=box.SIMPLE_HEAD)
    for header in headers:
        right = header.endswith(">")
        table.add_column(header.rstrip(">"), justify="right" if right else "left", overflow="fold")
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _or_empty(number: int | None) -> str:
    return "" if number is None else str(number)


def _date(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def _size(nbytes: float) -> str:
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.2f} {unit}"
    return f"{nbytes / 1024:.2f} TiB"
