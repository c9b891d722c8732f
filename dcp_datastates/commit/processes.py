"""Which process a rank is, so that others on its machine see at once that it is gone."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

__all__ = ["identity", "is_gone", "is_near"]


@functools.cache
def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When the process started, in the kernel's ticks; None if it is gone, or a zombie.

    Raises OSError if that cannot be known (too many open files, say).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def identity() -> str:
    """Machine, process and start: enough for a neighbour to see that the process is gone."""
    try:
        return f"{socket.gethostname()}|{_boot()}|{os.getpid()}|{_started(os.getpid())}"
    except OSError:  # then no rank sees its process
        return f"{socket.gethostname()}||{os.getpid()}|"


def is_gone(who: str) -> bool:
    """Whether that process, an :func:`identity`, has certainly ended. Never of one that cannot be seen."""
    _, boot, pid, started = who.split("|")
    try:
        return boot == _boot() != "" and _started(int(pid)) != started
    except OSError:
        return False


def is_near(who: str) -> bool:
    """Whether that process, if it is there, can be seen from this one: same boot of a machine, same namespace."""
    return who.split("|")[1] == _boot() != ""
