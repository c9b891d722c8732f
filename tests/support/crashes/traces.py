"""Traces of file operations (``dcp_datastates/storage/operations.py``): read, checked, and spoilt on purpose."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

OPERATIONS = {
    *("mkdir", "create", "write", "truncate", "allocate", "sync_begin", "sync"),
    *("rename", "link", "unlink", "rmdir", "told"),
}


class RecordError(ValueError):
    """A record that does not fit what was recorded before it."""


@dataclass(frozen=True)
class Record:
    """One operation that was done. Paths are relative to the root of the trace; ``""`` is the root."""

    op: str
    path: str
    offset: int = 0
    data: bytes = b""
    size: int = 0
    to: str = ""
    id: str = ""
    attempt: str = ""

    @property
    def parent(self) -> str:
        return _text(PurePosixPath(self.path).parent)

    def __str__(self) -> str:
        more = {
            "write": f" {len(self.data)} bytes at {self.offset}",
            "rename": f" to {self.to}",
            "link": f" to {self.to}",
            "truncate": f" to {self.size}",
            "allocate": f" {self.size}",
        }
        return f"{self.op} {self.path or '.'}{more.get(self.op, '')}"


def _text(path: PurePosixPath) -> str:
    return "" if path == PurePosixPath(".") else str(path)


def _relative(path: str, root: Path) -> str | None:
    try:
        return _text(PurePosixPath(os.path.normpath(path)).relative_to(root))
    except ValueError:
        return None


def read_trace(file: Path, root: Path) -> list[Record]:
    """The records of ``file`` that concern what is at or below ``root``, in an order that can have been."""
    records = []
    for line in map(os.fsdecode, file.read_bytes().splitlines()):
        entry = json.loads(line)
        if entry["op"] not in OPERATIONS:
            raise RecordError(f"unknown operation in the trace: {line[:200]}")
        path = _relative(entry["path"], root)
        if path is None:
            continue
        to = _relative(entry["to"], root) if "to" in entry else ""
        if to is None:
            raise RecordError(f"a rename out of {root}: {line[:200]}")
        records.append(
            Record(
                entry["op"],
                path,
                offset=int(entry.get("offset", 0)),
                data=bytes.fromhex(entry.get("data", "")),
                size=int(entry.get("size", 0)),
                to=to,
                id=str(entry.get("id", "")),
                attempt=str(entry.get("attempt", "")),
            )
        )
    return in_order(records)


def in_blocks(records: Iterable[Record], size: int = 4096) -> list[Record]:
    """The trace with each write cut into blocks: storage takes them in any order, and may miss any of them."""
    cut = []
    for record in records:
        if record.op != "write" or not record.data:
            cut.append(record)
            continue
        for begin in range(0, len(record.data), size):
            data = record.data[begin : begin + size]
            cut.append(dataclasses.replace(record, offset=record.offset + begin, data=data))
    return cut


def in_order(records: Iterable[Record]) -> list[Record]:
    """The records with those put forward that another process had seen the effect of, but not the record.

    An operation is recorded after it was done. In between, another process may find the directory that was
    made and record what it does in it, or find a directory empty and record that it removed it. A
    directory came before what is in it, and went after what was in it: that order is certain.
    """
    ordered = list(records)
    for record in sorted(ordered, key=lambda record: record.path.count("/")):
        if record.op == "mkdir":
            _put_before(ordered, record, lambda other, path=record.path: _at_or_below(other, path))
        elif record.op == "unlink":
            parent = record.parent
            _put_before(
                ordered, record, lambda other, d=parent: (other.op, other.path) == ("rmdir", d)
            )
    return ordered


def _at_or_below(record: Record, directory: str) -> bool:
    return record.path == directory or record.path.startswith(directory + "/")


def _put_before(records: list[Record], record: Record, where: Callable[[Record], bool]) -> None:
    """Move ``record`` before the first one that ``where`` is true of, if it is not there already."""
    place = next(place for place, other in enumerate(records) if other is record)
    target = next((place for place, other in enumerate(records) if where(other)), place)
    if target < place:
        records.insert(target, records.pop(place))


def without(records: Sequence[Record], syncs: Iterable[str]) -> list[Record]:
    """The trace of a program that leaves out the syncs with these ids."""
    left_out = set(syncs)
    return [
        record
        for record in records
        if not (record.op in ("sync", "sync_begin") and record.id in left_out)
    ]


def in_place(records: Sequence[Record], rename: Record, target: bytes | None) -> list[Record]:
    """The trace of a program that writes its data over the target where this one renames, or links.

    It truncates the target (or creates it, where ``target`` is None), writes, and syncs, and removes the
    file that it copied from: all that a careful program would do, but for the rename.
    """
    place = records.index(rename)
    content = b"".join(
        record.data
        for record in records[:place]
        if (record.op, record.path) == ("write", rename.path)
    )
    blank = dataclasses.replace(rename, to="")
    opened = "create" if target is None else "truncate"
    copied = [
        dataclasses.replace(blank, op=opened, path=rename.to),
        dataclasses.replace(blank, op="write", path=rename.to, data=content),
        dataclasses.replace(blank, op="sync_begin", path=rename.to, id="in place"),
        dataclasses.replace(blank, op="sync", path=rename.to, id="in place"),
    ]
    if rename.op == "rename":
        copied.append(dataclasses.replace(blank, op="unlink"))
    return [*records[:place], *copied, *records[place + 1 :]]
