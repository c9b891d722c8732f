"""The identity of a rank's process, so that ranks on the same machine see at once that the process is gone."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


@functools.cache
def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """The start time of the process, in the kernel's ticks; None if the process is gone, or a zombie.

    Raises OSError if the time cannot be read (too many open files, say).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def identity() -> str:
    """Machine, process and start time: enough for a rank on the same machine to see that the process is gone."""
    try:
        return f"{socket.gethostname()}|{_boot()}|{os.getpid()}|{_started(os.getpid())}"
    except OSError:  # then no rank can see the process
        return f"{socket.gethostname()}||{os.getpid()}|"


def is_gone(who: str) -> bool:
    """Whether the process with the :func:`identity` ``who`` has certainly ended. False if this process cannot
    see it.
    """
    _, _, pid, started = who.split("|")
    try:
        return is_near(who) and _started(int(pid)) != started
    except OSError:
        return False


def is_near(who: str) -> bool:
    """Whether this process could see the process ``who``: same boot of the same machine, same PID namespace.

    Machines that were copied while they ran may share the rest; so the host's name must be the same, too.
    """
    host, boot, _, _ = who.split("|")
    return boot == _boot() != "" and host == socket.gethostname()
