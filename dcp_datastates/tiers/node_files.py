"""The objects of a node: files below one directory, which all processes of the node share.

One is written to a file beside its place, which its process keeps locked, and then published under its key by a link or
a rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import math
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator
from itertools import filterfalse
from pathlib import Path, PurePosixPath
from typing import Final

from typing_extensions import Buffer

from dcp_datastates.process.forks import closed_in_children
from dcp_datastates.storage import local, operations, presence
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.attempts import INDEX_NAME
from dcp_datastates.storage.local_store import UNFINISHED, LocalStore, create_name
from dcp_datastates.storage.object_store import ObjectMissingError, StoredObject

_GRANT_BYTES: Final = 64 << 20
"""The most bytes of an object that are written before it is looked again how full the directory is, and synced."""

_NAMING_SECONDS: Final = 20.0
"""How long a request of another node waits until this process has named the path, too."""

_PHASE: Final = "node"


class NodeFiles:
    """The objects below ``directory``, which is made if it is missing. Any thread, any process of the node.

    Keys have no empty segment, ``.`` or ``..``, and do not begin with a dot. All methods raise OSError.

    Args:
        name: the node's.
        directory: ``/``: a key is the path of its file.
        most_bytes: of all objects together; None: as many as the file system has.
        sync: whether an object is on stable storage before it appears.
    """

    def __init__(
        self, name: str, directory: Path, most_bytes: int | None = None, sync: bool = False
    ) -> None:
        self.name: Final = name
        self.sync: Final = sync
        self._directory: Final = directory
        self._is_whole_system = directory == Path("/")
        self._most = most_bytes
        self._changed = threading.Condition()  # guards what follows
        self._named: set[str] = set()
        if not self._is_whole_system:
            self._check_own("")
            self.sweep("")

    @property
    def identity(self) -> str:
        """The same for two processes only if they share the directory."""
        if self._is_whole_system:
            return Path("/proc/sys/kernel/random/boot_id").read_text()
        found = os.stat(self._directory)
        return f"{found.st_dev}/{found.st_ino}"

    # ---- what other nodes may reach ------------------------------------------------------------------

    def name_path(self, key: str) -> bool:
        """This process uses what lies at ``key`` and below, so other nodes may reach it here. Removes what processes
        that were killed have left there. Returns whether it is new, and something lies there.
        """
        with self._changed:
            is_new = not self._is_named(key)
            if is_new:
                self._named |= {key, os.path.join(os.path.dirname(key), INDEX_NAME)}
                self._changed.notify_all()
        if self._is_whole_system:
            self.sweep(key)
        return is_new and bool(self.list(key))

    def check_named(self, key: str) -> str:
        """The key, if this process has named its path, or does soon. Raises PermissionError: in the whole file system,
        other nodes reach only what the job's checkpoints are.
        """
        if not self._is_whole_system:
            return key
        with self._changed:
            if self._changed.wait_for(lambda: self._is_named(key), _NAMING_SECONDS):
                return key
        raise PermissionError(
            errno.EACCES,
            f"a process there has not named the path within {_NAMING_SECONDS:g} s: every rank of the job names each "
            f"node:// path",
        )

    def _is_named(self, key: str) -> bool:
        return bool({key, *map(str, PurePosixPath(key).parents)} & self._named)

    # ---- reading -----------------------------------------------------------------------------------

    def find(self, key: str) -> StoredObject | None:
        """The object; None if there is none."""
        found = presence.judged(os.lstat, self._path(key))
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        return StoredObject(key, found.st_size, found.st_mtime)

    def read(self, key: str, begin: int, end: int) -> Buffer | None:
        """The bytes ``[begin, end)`` of the object; fewer if it ends before. None if there is none."""
        if self.find(key) is not None:
            with contextlib.suppress(ObjectMissingError):  # it was deleted a moment ago
                return LocalStore().get_range(self._path(key)[1:], begin, end)
        return None

    def list(self, prefix: str) -> list[StoredObject]:
        """The objects directly below ``prefix``, and the folders, whose keys end in a slash; in no order."""
        found = []
        for name in filterfalse(_is_unfinished, presence.names_in(self._path(prefix))):
            key = f"{prefix}/{name}"
            if (entry := self.find(key)) is not None:
                found.append(entry)
                continue
            objects = filterfalse(_is_unfinished, _files(self._path(key)))
            if not presence.is_link(self._path(key)) and any(objects):
                found.append(StoredObject(f"{key}/", 0, 0.0))
        return found

    # ---- changing ----------------------------------------------------------------------------------

    def unpublished(self, key: str, _seconds: float = math.inf) -> Unpublished:
        """A new object, empty so far, that is to appear under ``key``. (Another node takes each piece of it within
        ``_seconds``, or fails.)
        """
        target = self._path(key)
        self._check_own(os.path.dirname(target))
        return Unpublished(self, target)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; ones that are missing are no error."""
        for path in [self._path(key) for key in keys]:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                os.unlink(path)
            self.remove_empty(os.path.dirname(path))

    def remove_empty(self, folder: str) -> None:
        """Remove a folder that has nothing in it; an attempt's with the checkpoint's around it, but no user's."""
        above, name = os.path.split(folder)
        with contextlib.suppress(OSError):
            for each in (folder, above) if Attempt.parse(name) else (folder,):
                if len(each) > len(os.fspath(self._directory)):
                    os.rmdir(each)

    def sweep(self, key: str) -> None:
        """Remove what processes that were killed have left below ``key``; in the whole file system, only where
        checkpoints have files.
        """
        below = os.path.join(self._directory, key)
        for path in filter(_is_unfinished, _files(below, self._is_whole_system)):
            with contextlib.suppress(OSError), _opened(path, os.O_RDWR) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
                self.remove_empty(os.path.dirname(path))

    def left(self, key: str = "") -> int:
        """The bytes that still have room, at ``key``."""
        folder = self._directory / key
        while not presence.is_directory(folder):
            folder = folder.parent
        system = os.statvfs(folder)
        free = system.f_bavail * system.f_frsize
        if self._most is None:
            return free
        used = 0
        for path in _files(os.fspath(self._directory)):
            with contextlib.suppress(FileNotFoundError):  # it was deleted a moment ago
                used += os.lstat(path).st_size
        return max(0, min(self._most - used, free))

    def grant(self, nbytes: int) -> int:
        """How many bytes an object may have that is to have ``nbytes`` more, before it asks again: up to 64 MiB, less
        when little is left. So together, objects may exceed the limit a little. Raises OSError with ENOSPC if there is
        no room.
        """
        if self._most is None:
            return max(_GRANT_BYTES, nbytes)
        if (left := self.left()) < nbytes:
            raise OSError(
                errno.ENOSPC,
                f"the directory {self._directory} may have {self._most} bytes, and has room for {left}",
            )
        return max(nbytes, min(_GRANT_BYTES, left // 16))

    # ---- within ------------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        if key.startswith(".") or any(
            part in ("", ".", "..") or _is_unfinished(part) for part in key.split("/")
        ):
            raise OSError(errno.EINVAL, f"{key!r} is no key")
        return os.path.join(self._directory, key)

    def _check_own(self, folder: str) -> None:
        """Raise PermissionError unless this user alone may change what is written to ``folder``: of the whole file
        system, the first directory of the path that is not root's must be this user's.
        """
        if not self._is_whole_system:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            _check_own(self._directory)
            return
        for each in reversed([Path(folder), *Path(folder).parents]):
            try:
                owner = os.lstat(each).st_uid
            except FileNotFoundError:
                return
            if owner:
                _check_own(each)
                return


class Unpublished:
    """An object that is being written. One thread at a time. It does not appear unless it is published."""

    def __init__(self, files: NodeFiles, target: str) -> None:
        self._files, self._target = files, Path(target)
        self._folder, name = os.path.split(target)
        self._path: Final = Path(self._folder, f".{name}.{secrets.token_hex(8)}~")
        self._file = self._create()
        self._granted = 0

    def write(self, piece: Buffer) -> None:
        """Returns when ``piece`` may be changed."""
        view = memoryview(piece).cast("B")
        if self._granted < view.nbytes:
            self._granted = self._files.grant(view.nbytes)
            if self._files.sync and self._file.tell():  # so that no sync takes long
                os.fdatasync(self._file.fileno())
        self._granted -= view.nbytes
        while view.nbytes:
            view = view[self._file.write(view) :]

    def complete(self) -> None:
        """Returns when all pieces are in the file, as they are after each write."""

    def publish(self, if_absent: bool) -> bool:
        """Let the object appear under its key; ``if_absent``: unless one is there. Returns whether it has."""
        if self._files.sync:
            os.fsync(self._file.fileno())
        with operations.during(_PHASE):
            has_appeared = not if_absent or create_name(self._path, self._target)
            if not if_absent:
                operations.rename(self._path, self._target)
            # Also if another process has published it: it may have died before it synced the name.
            for folder in local.sync_directories(self._target.parent) if self._files.sync else ():
                operations.sync_directory(folder)
        return has_appeared

    def close(self) -> None:
        """Remove what is not published. Idempotent."""
        if not self._file.closed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
                self._files.remove_empty(self._folder)
            self._file.close()

    def _create(self) -> io.FileIO:
        """The file, locked: a file without a lock is one that a killed process has left."""
        while True:
            _make_folder(self._folder)
            try:
                file = _opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileNotFoundError:  # another process has removed the folder, which was empty
                continue
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
            f"be this user's ({os.getuid()}), and no other may write to it (chmod go-w); or use another one",
            os.fspath(directory),
        )


def _make_folder(folder: str) -> None:
    """Make it, and what is missing around it, for this user alone, whatever the umask says."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_folder(os.path.dirname(folder))
        _make_folder(folder)


def _opened(path: str | Path, flags: int) -> io.FileIO:
    """A file that children close: they would hold its lock, and its bytes when it is deleted."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode=0o600)
    return closed_in_children(io.FileIO(descriptor, "wb" if flags & os.O_WRONLY else "r+b"))


def _is_unfinished(path: str) -> bool:
    return UNFINISHED.fullmatch(os.path.basename(path)) is not None


def _files(folder: str, of_checkpoints: bool = False) -> Iterator[str]:
    """The paths of all files below ``folder``; ``of_checkpoints``: not of those below folders that lie deeper than
    checkpoints, and are no attempts.
    """
    for within, folders, names in os.walk(folder):
        if of_checkpoints and within != folder:
            folders[:] = filter(Attempt.parse, folders)
        yield from (os.path.join(within, name) for name in names)
