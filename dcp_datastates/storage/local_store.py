"""A directory as a store: the file system behind the protocol of the object stores (:mod:`object_store`).

An object is a file. It appears whole: its bytes are written to a temporary file beside it and synced, and the file then
gets the object's name. A replacement is a rename. A creation that must not replace anything is a hard link, which fails
if the name exists; where the file system has no links, it is a rename that replaces nothing. Each change of a name is
followed by a sync of its directory, so that it is durable when the call returns.

A key's folder must exist: only :func:`make_folder` makes one. So nothing can be created any more in the folder of an
attempt that was removed, however late the process is that tries. What asks storage raises :class:`StorageError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from typing_extensions import Buffer

from dcp_datastates.errors import DataStatesError, StorageError
from dcp_datastates.process.forks import closed_in_children
from dcp_datastates.storage import local, operations, presence
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_store import (
    Listing,
    NotDurableError,
    NotStoredError,
    ObjectMissingError,
    StoredObject,
)

UNFINISHED: Final = re.compile(r"\.(.*)\.[0-9a-f]{16}~", re.DOTALL)
"""The name of a temporary file, which a killed process may leave."""

_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)
_NO_RENAME: Final = (errno.EMFILE, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS)
"""Of a filled directory: gcsfuse with its default limit, and overlayfs."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_MARK: Final = "mark:"
_LONGEST_MARK: Final = 64
"""Bytes. On a full file system, so small an object is the text of a symbolic link: deletions must work there."""

_MOST_BYTES: Final = 4 << 30
"""Of the largest object that is read whole. The metadata of 16,384 ranks with 900 tensors each have 1 GiB."""


class LocalStore:
    """The file system of this machine. Keys are absolute paths without the slash at their beginning. Stateless."""

    url: Final = ""

    def put(self, key: str, data: Buffer) -> None:
        self._replace(key, [data], memoryview(data).nbytes)

    def _replace(self, key: str, pieces: Iterable[Buffer], nbytes: int | None) -> None:
        path = _path(key)
        with _written(path, pieces, nbytes) as unfinished:
            operations.rename(unfinished, path)
        _sync_name(path)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        path = _path(key)
        with _written(path, [data], memoryview(data).nbytes) as unfinished:
            created = create_name(unfinished, path)
            with contextlib.suppress(OSError):
                operations.unlink(unfinished)
        # Also if another process has created it: it may have died before it synced the name, and a caller relies on it.
        _sync_name(path, created)
        return created

    def put_stream(
        self, key: str, pieces: Iterator[Buffer], *, part_bytes: int, parts_in_flight: int
    ) -> None:
        self._replace(key, pieces, nbytes=None)

    def get(self, key: str) -> bytes:
        return _read(key, 0, None)

    def get_range(self, key: str, begin: int, end: int) -> Buffer:
        return _read(key, begin, end)

    def size(self, key: str) -> int:
        status = presence.status_of(_path(key))
        if status is None:
            raise ObjectMissingError(f"/{key}")
        return status.st_size

    def list(self, prefix: str) -> Listing:
        folders, links, files = [], [], []
        for entry in presence.entries_in(_path(prefix)):
            if UNFINISHED.fullmatch(entry.name):
                continue
            if not local.is_directory(entry):
                files.append(entry.name)
            elif entry.is_symlink():
                links.append(entry.name)
            else:
                folders.append(entry.name)
        beginning = f"{prefix}/" if prefix else ""

        def look(name: str) -> StoredObject | None:
            with contextlib.suppress(StorageError):  # a link that leads nowhere is a name, too
                if (status := presence.status_of(_path(beginning + name))) is not None:
                    return StoredObject(beginning + name, status.st_size, status.st_mtime)
            is_there = presence.is_there(_path(beginning + name))
            return StoredObject(beginning + name, 0, 0.0) if is_there else None

        objects = tuple(filter(None, presence.look_at_each(look, sorted(files))))
        return Listing(tuple(sorted(folders)), objects, tuple(sorted(links)))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = _path(key)
            with local.explained("deleting", path), contextlib.suppress(FileNotFoundError):
                operations.unlink(path)


def make_folder(key: str, phase: str) -> bool:
    """Make the folder ``key`` for objects, and its parents; returns whether this call made it."""
    path = _path(key)
    return path in local.make_directories(path, phase)


def remove_folder(key: str, whole: bool = False) -> bool:
    """Remove the folder ``key``, durably, if no object is in it (``whole``: no attempt); returns whether it is gone."""
    path = _path(key)
    for entry in presence.entries_in(path):
        if not (whole or UNFINISHED.fullmatch(entry.name)) or Attempt.parse(entry.name):
            continue
        with local.explained("deleting", entry.path):
            if entry.is_dir(follow_symlinks=False):
                operations.remove_tree(Path(entry))
            else:
                with contextlib.suppress(FileNotFoundError):
                    operations.unlink(Path(entry))
    with local.explained("deleting", path):
        try:
            operations.remove_directory(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return False
            raise
        with contextlib.suppress(FileNotFoundError):
            operations.sync_directory(path.parent)
    return True


def has_unfinished(key: str) -> bool:
    """Whether a killed process has left anything in the folder ``key``."""
    return any(map(UNFINISHED.fullmatch, presence.names_in(_path(key))))


def discard_folder(key: str) -> bool:
    """Remove the folder ``key`` by a rename, so that none can create anything in it; returns whether it is gone."""
    path = _path(key)
    gone = path.with_name(f".{path.name}.{secrets.token_hex(8)}~")
    with local.explained("deleting", path):
        try:
            operations.rename(path, gone)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno not in _NO_RENAME:
                raise
            return False
        operations.sync_directory(path.parent)
        operations.remove_tree(gone, ignore_errors=True)
    return True


def put_copy(key: str, of: str, data: Buffer) -> None:
    """Store the object ``of``, whose bytes are ``data``, as ``key``, too: another name of its file, which is durable
    already; the name may be gone after a crash.
    """
    path = _path(key)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}~")
    with local.explained("writing", path):
        try:
            operations.link(_path(of), unfinished)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            LocalStore().put(key, data)
            return
        try:
            operations.rename(unfinished, path)
        finally:  # a rename between two names of one file does nothing
            with contextlib.suppress(OSError):
                os.unlink(unfinished)


def sweep(key: str) -> None:
    """Remove what killed :func:`discard_folder` and :func:`put_copy` have left in the folder ``key``. Never raises."""
    with contextlib.suppress(OSError):
        for entry in presence.entries_in(_path(key)):
            name = UNFINISHED.fullmatch(entry.name)
            if name and name[1] == local.METADATA_NAME:
                os.unlink(entry)
            elif name and Attempt.parse(name[1]):
                operations.remove_tree(Path(entry), ignore_errors=True)


def _path(key: str) -> Path:
    return Path(f"/{key}")


@contextlib.contextmanager
def _written(path: Path, pieces: Iterable[Buffer], nbytes: int | None) -> Iterator[Path]:
    """A temporary file beside ``path`` with the ``nbytes`` of ``pieces`` (None: they cannot be made again), on stable
    storage. The caller renames or removes it; after an error it is gone.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}~")
    with local.explained("writing", path):
        try:
            _write(unfinished, path, pieces, nbytes)
            yield unfinished
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            if isinstance(error, FileNotFoundError) and not isinstance(error, DataStatesError):
                raise ObjectMissingError(str(path)) from error  # its folder is
            raise


def _write(unfinished: Path, path: Path, pieces: Iterable[Buffer], nbytes: int | None) -> None:
    try:
        try:
            operations.write_new_file(unfinished, pieces)
        except OSError as error:
            if error.errno not in _FULL or nbytes is None or nbytes > _LONGEST_MARK:
                raise
            with operations.reached(unfinished) as name:
                with contextlib.suppress(FileNotFoundError):  # it would mean: no folder
                    os.unlink(name)
                os.symlink(_MARK + b"".join(pieces).hex(), name)
    except OSError as error:
        if isinstance(error, DataStatesError | FileNotFoundError):
            raise
        space = local.about_space(error.errno, path, nbytes or 0)
        raise NotStoredError(
            error.errno, f"writing failed: {error.strerror}{space}", str(path)
        ) from error


def _read(key: str, begin: int, end: int | None) -> bytes:
    """The bytes ``[begin, end)`` of an object (None: to its end), fewer if it ends before."""
    path = _path(key)
    with contextlib.suppress(OSError, ValueError):
        text = os.readlink(path)
        if text.startswith(_MARK):
            return bytes.fromhex(text.removeprefix(_MARK))[begin:end]
    if (descriptor := presence.judged(local.open_regular, path)) is None:
        raise ObjectMissingError(str(path))
    with closed_in_children(open(descriptor, "rb")) as file, local.explained("reading", path):
        nbytes = os.fstat(descriptor).st_size
        if end is None and nbytes > _MOST_BYTES:
            why = f"it has {nbytes} bytes, more than the metadata of any checkpoint"
            raise StorageError(errno.EFBIG, why, str(path))
        file.seek(begin)
        return file.read(max(0, min(nbytes, nbytes if end is None else end) - begin))


def create_name(unfinished: Path, path: Path) -> bool:
    """Give the file ``unfinished`` the name ``path`` unless there is such a name; returns whether it has it."""
    try:
        operations.link(unfinished, path)
        return True
    except FileExistsError:
        # NFS repeats a request whose reply was lost, and then finds the name that the first one made.
        return os.lstat(unfinished).st_nlink > 1
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        operations.rename_new(unfinished, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in operations.NO_RENAME_FLAGS:
            raise
        raise StorageError(
            errno.EOPNOTSUPP,
            "the file system has no hard links, and no renames that replace nothing",
            str(path),
        ) from error


def _sync_name(path: Path, created: bool = False) -> None:
    """Make the name ``path`` durable. A failure is final: a second sync of a directory may succeed in spite of it.

    ``created``: whether this call alone has made the name, by which others go from then on.
    """
    try:
        operations.sync_directory(path.parent)
    except FileNotFoundError:
        if created:
            why = "it was created, and another process has removed its folder since"
            raise NotDurableError(errno.ENOENT, why, str(path)) from None
        raise ObjectMissingError(str(path)) from None
    except OSError as error:
        raise NotDurableError(
            error.errno,
            f"it has its name, but making that durable failed: {error.strerror}; it is there now, and may be gone "
            f"after a crash",
            str(path),
        ) from error
