"""The objects that lie in the memory of one node: files below one directory, which all processes of the node share.

An object is written to a file in :data:`_UNFINISHED`, which its process keeps locked, and then published under its key
by a link or a rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from typing_extensions import Buffer

from dcp_datastates.process.forks import closed_in_children

_UNFINISHED: Final = ".unfinished"

_GRANT_BYTES: Final = 64 << 20
"""The most bytes that a process writes before it looks again how full the directory is."""


class Entry(NamedTuple):
    """One object, or a folder, whose key ends in a slash."""

    key: str
    nbytes: int
    modified_ns: int
    """By the clock of the process that has stored it: the same on all nodes, so it tells one state of an object from
    another.
    """


class RamFiles:
    """The objects below ``directory``, which is made if it is missing. Any thread, any process of the node.

    Keys have no empty segment, ``.`` or ``..``, and do not begin with a dot. All methods raise OSError.

    Args:
        most_bytes: of all objects together; None: half of the file system.
    """

    def __init__(self, directory: Path, most_bytes: int | None = None) -> None:
        self._directory: Final = directory
        self._make()
        system = os.statvfs(directory)
        self._most = system.f_blocks * system.f_frsize // 2 if most_bytes is None else most_bytes
        self._lock = threading.RLock()  # guards _granted
        self._granted = 0
        self._remove_unfinished()

    @property
    def identity(self) -> str:
        """The same for two processes only if they share the directory."""
        found = os.stat(self._directory)
        return f"{found.st_dev}/{found.st_ino}"

    # ---- reading -----------------------------------------------------------------------------------

    def find(self, key: str) -> Entry | None:
        """The object; None if there is none."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return _entry(key, os.stat(self._path(key)))
        return None

    def read(self, key: str, begin: int, end: int) -> tuple[Entry, bytes] | None:
        """The object, and its bytes ``[begin, end)``; fewer if it ends before. None if there is none."""
        try:
            file = closed_in_children(open(self._path(key), "rb"))  # noqa: SIM115
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        with file:
            entry = _entry(key, os.fstat(file.fileno()))
            if entry is None:
                return None
            file.seek(begin)
            return entry, file.read(max(0, min(end, entry.nbytes) - begin))

    def list(self, prefix: str) -> list[Entry]:
        """The objects and the folders directly below ``prefix``, in no order."""
        found = []
        for each in _scan(self._path(prefix)):
            key = f"{prefix}/{each.name}"
            if each.is_dir(follow_symlinks=False):
                if any(names for _, _, names in os.walk(each.path)):
                    found.append(Entry(f"{key}/", 0, 0))
            elif (entry := _entry_of(key, each)) is not None:
                found.append(entry)
        return found

    # ---- changing ----------------------------------------------------------------------------------

    def unpublished(self, key: str) -> Unpublished:
        """A new object, empty so far, that is to appear under ``key``."""
        target = self._path(key)
        self._make()
        return Unpublished(self, target, self._directory / _UNFINISHED)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; ones that are missing are no error."""
        for path in [self._path(key) for key in keys]:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                os.unlink(path)
            self._remove_empty(os.path.dirname(path))

    def left(self) -> int:
        """The bytes that still have room."""
        used = 0
        for folder, _, names in os.walk(self._directory):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # it was deleted a moment ago
                    used += os.lstat(os.path.join(folder, name)).st_size
        system = os.statvfs(self._directory)
        return max(0, min(self._most - used, system.f_bavail * system.f_frsize))

    def take(self, nbytes: int) -> None:
        """Ask for room for ``nbytes`` more. Raises OSError with ENOSPC if there is none.

        Processes ask by turns of up to 64 MiB, less when little is left, so together they may exceed the limit a
        little.
        """
        with self._lock:
            if self._granted >= nbytes:
                self._granted -= nbytes
                return
        left = self.left()
        if left < nbytes:
            raise OSError(
                errno.ENOSPC,
                f"the directory {self._directory} may have {self._most} bytes, and has room for {left}",
            )
        with self._lock:
            self._granted = max(0, min(_GRANT_BYTES, left // 16) - nbytes)

    # ---- within ------------------------------------------------------------------------------------

    def _make(self) -> None:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        _check_own(self._directory)
        os.makedirs(self._directory / _UNFINISHED, mode=0o700, exist_ok=True)

    def _path(self, key: str) -> str:
        if key.startswith(".") or any(part in ("", ".", "..") for part in key.split("/")):
            raise OSError(errno.EINVAL, f"{key!r} is no key")
        return os.path.join(self._directory, key)

    def _remove_empty(self, folder: str) -> None:
        while len(folder) > len(os.fspath(self._directory)):
            try:
                os.rmdir(folder)
            except OSError:
                return
            folder = os.path.dirname(folder)

    def _remove_unfinished(self) -> None:
        """Remove what processes that were killed have left."""
        for each in _scan(self._directory / _UNFINISHED):
            with contextlib.suppress(OSError), _opened(each.path, os.O_RDWR) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(each.path)


class Unpublished:
    """An object that is being written. One thread at a time. It does not appear unless it is published."""

    def __init__(self, files: RamFiles, target: str, folder: Path) -> None:
        self._files, self._target = files, target
        self._path: Final = os.fspath(folder / secrets.token_hex(12))
        self._file = self._create()

    def write(self, piece: Buffer) -> None:
        """Returns when ``piece`` may be changed."""
        view = memoryview(piece).cast("B")
        self._files.take(view.nbytes)
        while view.nbytes:
            view = view[self._file.write(view) :]

    def complete(self) -> None:
        """Returns when all pieces are in the file, as they are after each write."""

    def publish(self, modified_ns: int, *, if_absent: bool) -> bool:
        """Let the object appear under its key, with this time; ``if_absent``: unless one is there. Returns whether it
        has.
        """
        os.utime(self._file.fileno(), ns=(modified_ns, modified_ns))
        while True:
            try:
                os.makedirs(os.path.dirname(self._target), mode=0o700, exist_ok=True)
                return self._appear(if_absent)
            except FileNotFoundError:  # another process has removed the folder, which was empty
                if not os.fstat(self._file.fileno()).st_nlink:
                    raise

    def close(self) -> None:
        """Remove what is not published. Idempotent."""
        if not self._file.closed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._file.close()

    def _appear(self, if_absent: bool) -> bool:
        if not if_absent:
            os.replace(self._path, self._target)
            return True
        try:
            os.link(self._path, self._target)
        except FileExistsError:
            return False
        return True

    def _create(self) -> io.FileIO:
        """The file, locked: a file without a lock is one that a killed process has left."""
        while True:
            file = _opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()  # another process has removed it before it was locked


def _check_own(directory: Path) -> None:
    """Raise PermissionError unless this user alone may change the directory: whoever made it before, under a name that
    can be guessed, could read and forge what is stored.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            errno.EACCES,
            f"the directory belongs to user {found.st_uid} and has the mode {stat.filemode(found.st_mode)}: it must "
            f"be this user's ({os.getuid()}), and no other may write to it (chmod go-w); or pass another one to "
            f"configure_ram(directory=…)",
            os.fspath(directory),
        )


def _opened(path: str | Path, flags: int) -> io.FileIO:
    """A file that children close: they would hold its lock, and its bytes when it is deleted."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode=0o600)
    return closed_in_children(io.FileIO(descriptor, "wb" if flags & os.O_WRONLY else "r+b"))


def _entry(key: str, found: os.stat_result) -> Entry | None:
    return Entry(key, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _entry_of(key: str, found: os.DirEntry[str]) -> Entry | None:
    with contextlib.suppress(FileNotFoundError):  # it was deleted a moment ago
        return _entry(key, found.stat(follow_symlinks=False))
    return None


def _scan(directory: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(os.fspath(directory)) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
