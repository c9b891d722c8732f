"""Asking the operating system: processor time, memory, durability, the page cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of this process and of all its descendants, the running ones included."""
    times = os.times()
    return (
        times.user
        + times.system
        + times.children_user
        + times.children_system
        + _running(os.getpid())
    )


def _running(process: int) -> float:
    total = 0.0
    for child in _children(process):
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        total += sum(map(int, fields[11:15])) / _TICK + _running(child)
    return total


def _children(process: int) -> Iterator[int]:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            yield from map(int, children.read_text().split())
        except OSError:  # the thread has ended meanwhile
            continue


def resident_bytes(process: int | None = None) -> int:
    """Of this process and its descendants: pages that are shared with others count by halves, thirds, …"""
    process = process or os.getpid()
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:  # it has ended meanwhile
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    own = int(found[1]) << 10 if found else 0
    return own + sum(resident_bytes(child) for child in _children(process))


class Peak:
    """Bytes of resident memory, mapped files included, by which this process has grown at most since."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._status("VmRSS")

    def grown(self) -> int:
        return max(0, self._status("VmHWM") - self._before)

    @staticmethod
    def _status(key: str) -> int:
        found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) << 10


def files_of(path: Path) -> Iterator[Path]:
    return (each for each in path.rglob("*") if each.is_file())


def sync_tree(path: Path) -> None:
    """Sync all files and folders of ``path``, and of the folder that holds it."""
    for each in (*path.rglob("*"), path, path.parent):
        file = os.open(each, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def drop(path: Path) -> None:
    """Ask the kernel to forget the pages of all files of ``path``, which are durable and not mapped."""
    for each in files_of(path):
        with each.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path: Path) -> None:
    """Read all files of ``path`` into the page cache."""
    for each in files_of(path):
        with each.open("rb") as file:
            while file.read(8 << 20):
                pass
