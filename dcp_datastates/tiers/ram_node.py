"""A node of ``ram://`` stores: the objects in its memory, and how other nodes reach them.

The objects are files below one directory, which all processes of the node share. One is written to a file in
:data:`_UNFINISHED`, which its process keeps locked, and then published under its key by a link or a rename. Each
process of the node has a server for the other nodes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from typing_extensions import Buffer

from dcp_datastates.process.forks import closed_in_children
from dcp_datastates.tiers.pace import Pace
from dcp_datastates.wire.line import Client, DamagedError, Line
from dcp_datastates.wire.secret import Address
from dcp_datastates.wire.server import Server, listen

_UNFINISHED: Final = ".unfinished"

_GRANT_BYTES: Final = 64 << 20
"""The most bytes that a process writes before it looks again how full the directory is."""

_MOST_IDLE: Final = 2
"""Connections to a node that are kept: with many nodes a process must not need many descriptors."""

_MOST_BYTES: Final = 8 << 30
"""Of an object that is read whole: more than the metadata of any checkpoint."""

_PIECE_BYTES: Final = 1 << 20
"""What a server holds of an object that comes."""

_MOST_UNANSWERED: Final = 8
"""Pieces that are on their way to a node."""

_THREAD_NAME: Final = "dcp_datastates-ram"


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


# ---- another node ----------------------------------------------------------------------------------


class OtherNode:
    """Another node, through the servers of its processes. The methods are those of :class:`RamFiles`; an OSError that
    they raise names the node.
    """

    def __init__(self, name: str, addresses: Sequence[Address], pace: Pace) -> None:
        self.name: Final = name
        self.client: Final = Client(addresses, most_idle=_MOST_IDLE)
        self._pace = pace

    def find(self, key: str) -> Entry | None:
        found, _ = self._asked("find", key)
        return None if found is None else Entry(*found)

    def read(self, key: str, begin: int, end: int) -> tuple[Entry, Buffer] | None:
        found, data = self._asked("read", key, begin, end, most=min(end - begin, _MOST_BYTES))
        return None if found is None else (Entry(*found), data)

    def list(self, prefix: str) -> list[Entry]:
        return [Entry(*each) for each in self._asked("list", prefix)[0]]

    def delete(self, keys: Iterable[str]) -> None:
        self._asked("delete", list(keys))

    def left(self) -> int:
        return int(self._asked("left")[0])

    def unpublished(self, key: str) -> UnpublishedThere:
        with self.named():
            line, _, _ = self.client.begin(["put", key])
        return UnpublishedThere(self, line, self._pace)

    def _asked(self, *words: object, most: int = 0) -> tuple[Any, Buffer]:
        with self.named():
            return self.client.ask(words, most=most)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Names the node in errors."""
        try:
            yield
        except OSError as error:
            text = error.strerror or str(error) or type(error).__name__
            where = ", ".join(f"{each.host}:{each.port}" for each in self.client.addresses[:3])
            raise OSError(error.errno or errno.EIO, f"node {self.name} ({where}): {text}") from None


class UnpublishedThere:
    """As :class:`Unpublished`, on another node. Sends pieces ahead of their answers.
    After an error, the connection is closed, and nothing appears.
    """

    def __init__(self, node: OtherNode, line: Line, pace: Pace) -> None:
        self._node, self._line, self._pace = node, line, pace
        self._unanswered = 0
        self._is_over = False

    def write(self, piece: Buffer) -> None:
        view = memoryview(piece).cast("B")
        time.sleep(self._pace.delay(view.nbytes))
        for begin in range(0, view.nbytes, _PIECE_BYTES):
            with self._node.named():
                self._line.send("piece", view[begin : begin + _PIECE_BYTES])
            self._unanswered += 1
            self._await(_MOST_UNANSWERED)

    def complete(self) -> None:
        self._await(0)

    def publish(self, modified_ns: int, *, if_absent: bool) -> bool:
        with self._node.named():
            self._line.send(["publish", modified_ns, if_absent])
            published, _ = self._line.result()
        self._is_over = True
        self._node.client.give_back(self._line)
        return bool(published)

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._line.close()

    def _await(self, most: int) -> None:
        while self._unanswered > most:
            with self._node.named():
                self._line.result()
            self._unanswered -= 1


Node = RamFiles | OtherNode
Writing = Unpublished | UnpublishedThere

# ---- the server ----------------------------------------------------------------------------------------


def serve(files: RamFiles, host: str) -> Server:
    """A server that gives the other nodes access to ``files``, at ``host``, an address of this machine. Raises OSError
    if it cannot listen there.
    """
    return Server(*listen(host), _THREAD_NAME, functools.partial(_serve, files))


def _serve(files: RamFiles, line: Line) -> None:
    new: Unpublished | None = None
    with contextlib.ExitStack() as unpublished:
        for words, data in line.requests(_PIECE_BYTES):
            result: Any = None
            found: Buffer = b""
            try:
                match words:
                    case ["put", str(key)]:
                        unpublished.close()
                        new = unpublished.enter_context(contextlib.closing(files.unpublished(key)))
                    case "piece" if new is not None:
                        new.write(data)
                    case ["publish", int(modified_ns), bool(if_absent)] if new is not None:
                        result = new.publish(modified_ns, if_absent=if_absent)
                        unpublished.close()
                        new = None
                    case ["find", str(key)]:
                        result = files.find(key)
                    case ["read", str(key), int(begin), int(end)] if begin >= 0:
                        result, found = files.read(key, begin, end) or (None, b"")
                    case ["list", str(prefix)]:
                        result = files.list(prefix)
                    case ["delete", list(keys)] if all(isinstance(key, str) for key in keys):
                        files.delete(keys)
                    case ["left"]:
                        result = files.left()
                    case _:
                        raise DamagedError
            except OSError as error:
                unpublished.close()
                new = None
                line.refuse(error)
            else:
                line.answer(result, found)
