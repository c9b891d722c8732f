"""``dcp-datastates inspect``: what is in a checkpoint, or in a directory of checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Final

from rich.text import Text

from dcp_datastates.checkpoints.describe import Checkpoint, Directory, describe
from dcp_datastates.text import count, size
from dcp_datastates_cli.output import OK, date, pipe_may_close, print_json, print_table, table

__all__ = ["run"]

_FILES_SHOWN: Final = 16


def run(options: argparse.Namespace) -> int:
    """Say what is at ``options.path``; returns the exit status."""
    found = describe(options.path)
    if options.json:
        print_json(_document(found, options.tensors))
        return OK
    with pipe_may_close():
        if isinstance(found, Directory):
            _print_directory(found)
        else:
            _print_checkpoint(found, options.tensors)
    return OK


def _document(found: Checkpoint | Directory, tensors: bool) -> dict[str, Any]:
    if isinstance(found, Directory):
        return {"kind": "directory", **dataclasses.asdict(found)}
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
    shown = table("checkpoint", "step>", "committed", "attempt", "size>", "ranks>", "")
    for listed in found.checkpoints:
        note = "latest" if listed.name == found.latest else listed.problem or ""
        shown.add_row(
            Text(listed.name),
            _or_empty(listed.step),
            date(listed.committed_at) or ("yes" if listed.committed else "no"),
            listed.attempt or "",
            "" if listed.nbytes is None else size(listed.nbytes),
            _or_empty(listed.ranks),
            Text(note),
        )
    print_table(shown)


def _print_checkpoint(found: Checkpoint, tensors: bool) -> None:
    print(found.path)
    if found.committed:
        objects = sum(element.nbytes for element in found.objects)
        print(f"  committed {date(found.committed_at)}, attempt {found.attempt}")
        print(
            f"  {size(found.nbytes)} in {count(len(found.files), 'file')} of "
            f"{count(found.ranks, 'rank')}: {count(len(found.tensors), 'tensor')}, "
            f"{count(len(found.objects), 'object')} ({size(objects)})"
        )
    else:
        print("  not committed")
    if found.uncommitted:
        _print_uncommitted(found)
    if found.dtypes:
        shown = table("dtype", "tensors>", "size>")
        for total in found.dtypes:
            shown.add_row(total.dtype, str(total.tensors), size(total.nbytes))
        print_table(shown)
    if found.files:
        _print_files(found)
    if tensors:
        _print_tensors(found)


def _print_uncommitted(found: Checkpoint) -> None:
    shown = table("uncommitted attempt", "state", "files>", "size>")
    for attempt in found.uncommitted:
        shown.add_row(attempt.attempt, attempt.state, str(attempt.files), size(attempt.nbytes))
    print_table(shown)


def _print_files(found: Checkpoint) -> None:
    shown = table("file", "rank>", "size>", "")
    for file in found.files[:_FILES_SHOWN]:
        note = ""
        if file.found_nbytes is None:
            note = "missing"
        elif file.found_nbytes != file.nbytes:
            note = f"has {file.found_nbytes} bytes instead of {file.nbytes}"
        shown.add_row(Text(file.path), _or_empty(file.rank), size(file.nbytes), note)
    print_table(shown)
    if len(found.files) > _FILES_SHOWN:
        print(f" … and {len(found.files) - _FILES_SHOWN} more (all with --json)")


def _print_tensors(found: Checkpoint) -> None:
    shown = table("name", "shape", "dtype", "size>", "chunks>")
    for tensor in found.tensors:
        shape = " × ".join(map(str, tensor.shape)) or "scalar"
        shown.add_row(
            Text(tensor.name), shape, tensor.dtype, size(tensor.nbytes), str(tensor.chunks)
        )
    for element in found.objects:
        shown.add_row(Text(element.name), "", "object", size(element.nbytes), "")
    print_table(shown)


def _or_empty(number: int | None) -> str:
    return "" if number is None else str(number)
