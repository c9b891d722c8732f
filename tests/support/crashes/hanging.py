"""Storage that stops answering: every call of Python's into the operating system below one directory, from the n-th on,
blocks until it is released. Nothing is mounted for it, so a test can ask for each n in turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Hanging", "hanging"]

_BY_PATH = (
    *("access", "listdir", "lstat", "mkdir", "open", "rename", "rmdir", "scandir", "stat"),
    *("statvfs", "unlink"),
)
_BY_DESCRIPTOR = ("close", "fstat", "fsync", "write")


class Hanging:
    """Which call hangs, and what it was.

    Args:
        root: the directory that calls below it are counted for.
        first: the number of the first call that hangs, from 0; None: none does.
        only: whether later calls pass.
    """

    def __init__(self, root: Path, first: int | None, *, only: bool) -> None:
        self.calls = 0
        self.hung: str | None = None
        """The first call that hung; None if there were not as many."""
        self._root = str(root)
        self._first = first
        self._only = only
        self._lock = threading.Lock()
        self._released = threading.Event()

    def release(self) -> None:
        """Let the calls go on that hang."""
        self._released.set()

    def pass_(self, name: str, where: object) -> None:
        """A call is about to be made."""
        if not isinstance(where, (str, os.PathLike)) or not os.fspath(where).startswith(self._root):
            return
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
            if self._first is None or number < self._first:
                return
            if self._only and number > self._first:
                return
            self.hung = self.hung or f"{name} of {os.path.basename(where)!r}"
        self._released.wait()


@contextlib.contextmanager
def hanging(root: Path, first: int | None = None, *, only: bool = False) -> Iterator[Hanging]:
    """Let calls below ``root`` hang, as :class:`Hanging` says; they are released when the block ends."""
    it = Hanging(root, first, only=only)

    def by_path(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(where: Any = None, *args: Any, **options: Any) -> Any:
            it.pass_(name, where)
            return call(where, *args, **options)

        return made

    def by_descriptor(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        link = os.readlink

        def made(descriptor: int, *args: Any) -> Any:
            with contextlib.suppress(OSError):
                it.pass_(name, link(f"/proc/self/fd/{descriptor}"))
            return call(descriptor, *args)

        return made

    with pytest.MonkeyPatch.context() as patch:
        for name in _BY_PATH:
            patch.setattr(os, name, by_path(name, getattr(os, name)))
        for name in _BY_DESCRIPTOR:
            patch.setattr(os, name, by_descriptor(name, getattr(os, name)))
        patch.setattr(fcntl, "flock", by_descriptor("flock", fcntl.flock))
        patch.setattr(io, "open", by_path("open", io.open))
        try:
            yield it
        finally:
            it.release()
