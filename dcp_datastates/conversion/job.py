"""What a writer of any format hands over: the work of writing, and what is done after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dcp_datastates.process.work import Unit

__all__ = ["Job", "Limits"]


@dataclass(frozen=True)
class Limits:
    """How much is done at a time."""

    threads: int
    piece_bytes: int
    """The memory for what one unit writes, in bytes: a multiple of 1 MiB."""
    shard_bytes: int
    """The most bytes of tensors in one file, where a format has several. A larger tensor has a file of its own."""


@dataclass(frozen=True)
class Job:
    """A conversion that can begin."""

    units: Iterable[Unit]
    files: tuple[Path, ...]
    """The files that are written, without those of :attr:`finish`."""
    finish: Callable[[], None] = lambda: None
    """Completes the output, after all units."""
    close: Callable[[], None] = lambda: None
    """Called in any case, when no unit is running."""
