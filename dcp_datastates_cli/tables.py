"""The tables of ``dcp-datastates inspect``. Imported where one is printed: no other command needs rich."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcp_datastates.checkpoints.describe import Checkpoint, Directory, Listed
from dcp_datastates.text import count, date, duration, numbers, printable, size
from dcp_datastates_cli.output import say

__all__ = ["print_checkpoint", "print_directory", "watched"]

_FILES_SHOWN: Final = 16

_PLAIN_WIDTH: Final = 160
"""Columns of a table that is printed to no terminal."""


def print_directory(found: Directory) -> None:
    """A line for each checkpoint."""
    shown = _table("checkpoint", "step>", "committed", "attempt", "size>", "ranks>", "metrics", "")
    for listed in found.checkpoints:
        notes = ["latest" if listed.name == found.latest else listed.problem or ""]
        notes += [f"pinned: {', '.join(listed.pins)}"] if listed.pins else []
        shown.add_row(
            _text(listed.name),
            _or_empty(listed.step),
            date(listed.committed_at) or ("yes" if listed.committed else "no"),
            listed.attempt or "",
            "" if listed.nbytes is None else size(listed.nbytes),
            _or_empty(listed.ranks),
            _text(numbers(listed.metrics)),
            _text("; ".join(filter(None, notes))),
        )
    _print(shown)


def print_checkpoint(found: Checkpoint, tensors: bool) -> None:
    """All of it; every tensor and object, too, if ``tensors``."""
    say(found.path)
    if found.committed:
        objects = sum(element.nbytes for element in found.objects)
        say(f"  committed {date(found.committed_at)}, attempt {found.attempt}")
        say(
            f"  {size(found.nbytes)} in {count(len(found.files), 'file')} of "
            f"{count(found.ranks, 'rank')}: {count(len(found.tensors), 'tensor')}, "
            f"{count(len(found.objects), 'object')} ({size(objects)})"
        )
    else:
        say("  not committed")
    if found.metrics:
        say(f"  {numbers(found.metrics)}")
    if found.pins:
        say(f"  pinned: {', '.join(found.pins)}")
    if found.uncommitted:
        _print_uncommitted(found)
    if found.dtypes:
        shown = _table("dtype", "tensors>", "size>")
        for total in found.dtypes:
            shown.add_row(total.dtype, str(total.tensors), size(total.nbytes))
        _print(shown)
    if found.files:
        _print_files(found)
    if tensors:
        _print_tensors(found)


def watched(
    root: str,
    committed: Sequence[Listed],
    open_saves: Sequence[Listed],
    due: float | None,
    now: float,
) -> Table:
    """What ``watch`` shows: saves without a commit, and the newest checkpoints with their age and distance."""
    shown = _table("checkpoint", "step>", "size>", "committed", "age>", "after>", "metrics", "")
    shown.title = printable(root)
    for each in open_saves:
        shown.add_row(
            _text(each.name), _or_empty(each.step), "", "", "", "", "", each.problem or ""
        )
    times = [each.committed_at for each in committed]
    for each, before in zip(committed, [*times[1:], None], strict=True):
        at = each.committed_at
        shown.add_row(
            _text(each.name),
            _or_empty(each.step),
            "" if each.nbytes is None else size(each.nbytes),
            date(at),
            "" if at is None else duration(max(0.0, now - at)),
            "" if at is None or before is None else duration(max(0.0, at - before)),
            _text(numbers(each.metrics)),
            _text(each.problem or ""),
        )
    if due is not None:
        late = f"{duration(now - due)} late" if now > due else f"in {duration(due - now)}"
        shown.caption = f"next commit: {late}"
    return shown


def _print_uncommitted(found: Checkpoint) -> None:
    shown = _table("uncommitted attempt", "state", "files>", "size>")
    for attempt in found.uncommitted:
        shown.add_row(attempt.attempt, attempt.state, str(attempt.files), size(attempt.nbytes))
    _print(shown)


def _print_files(found: Checkpoint) -> None:
    shown = _table("file", "rank>", "size>", "")
    for file in found.files[:_FILES_SHOWN]:
        note = ""
        if file.found_nbytes is None:
            note = "missing"
        elif file.found_nbytes != file.nbytes:
            note = f"has {file.found_nbytes} bytes instead of {file.nbytes}"
        shown.add_row(_text(file.path), _or_empty(file.rank), size(file.nbytes), note)
    _print(shown)
    if len(found.files) > _FILES_SHOWN:
        say(f" … and {len(found.files) - _FILES_SHOWN} more (all with --json)")


def _print_tensors(found: Checkpoint) -> None:
    shown = _table("name", "shape", "dtype", "size>", "chunks>")
    for tensor in found.tensors:
        shape = " × ".join(map(str, tensor.shape)) or "scalar"
        shown.add_row(
            _text(tensor.name), shape, tensor.dtype, size(tensor.nbytes), str(tensor.chunks)
        )
    for element in found.objects:
        shown.add_row(_text(element.name), "", "object", size(element.nbytes), "")
    _print(shown)


def _text(name: str) -> Text:
    return Text(printable(name).replace("\n", "\\n"))


def _or_empty(number: int | None) -> str:
    return "" if number is None else str(number)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let it through: rich would exit with 1, which here means damage."""
        raise BrokenPipeError


def _table(*headers: str) -> Table:
    """A table with these columns. ``>`` at a header's end aligns its column to the right."""
    made = Table(box=box.SIMPLE_HEAD)
    for header in headers:
        right = header.endswith(">")
        made.add_column(header.rstrip(">"), justify="right" if right else "left", overflow="fold")
    return made


def _print(shown: Table) -> None:
    """As wide as the terminal; names are not taken for markup. To a pipe, without blanks at the ends of lines."""
    if sys.stdout.isatty():
        _Console(highlight=False, markup=False).print(shown)
        return
    text = io.StringIO()
    Console(file=text, width=_PLAIN_WIDTH, highlight=False, markup=False).print(shown)
    print("\n".join(map(str.rstrip, text.getvalue().splitlines())))
