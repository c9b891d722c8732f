"""The file operations outside the native engine, one function each: so that tests can watch and break them.

Every operation passes two failpoints, ``<phase>.<operation>.before`` and ``.after``; without a ``phase``, it belongs to
that of :func:`during`. None begins in work that was abandoned (``bounded.py``). CONTRIBUTING.md describes the trace
(``DCP_DATASTATES_TRACE``), from which tests compute what a crash could leave behind. (Paths are the system's bytes:
:func:`os.fsdecode` reads a line.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from typing_extensions import Buffer

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import presence
from dcp_datastates.storage.bounded import step
from dcp_datastates.storage.failpoints import hit

logger = logging.getLogger(__name__)

TRACE_VARIABLE: Final = "DCP_DATASTATES_TRACE"
"""Has the path of the trace; empty, or unset, if there is no trace."""

NO_RENAME_FLAGS: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What :func:`exchange` and :func:`rename_new` raise where the file system knows no such renames."""

_NO_DIRECTORY_SYNC: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What an fsync of a directory says where it is not needed, as in SMB. ``output_file.cpp`` goes by the same."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2

_sync_ids = itertools.count(1)
_unsynced: Final[set[int]] = set()
"""The devices of which the log has said that they have no fsync of a directory."""


def _trace(operation: str, path: Path, **more: Any) -> None:
    trace = os.environ.get(TRACE_VARIABLE, "")
    if trace and _current.phase != SELF_TEST:
        record = {"op": operation, "path": str(path), **more}
        line = json.dumps(record, default=memoryview.hex, ensure_ascii=False) + "\n"
        descriptor = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, os.fsencode(line))
        finally:
            os.close(descriptor)


def tell(path: Path, attempt: str) -> None:
    """Record in the trace that from here on the user may rely on ``attempt`` at ``path``."""
    _trace("told", path, attempt=attempt)


SELF_TEST: Final = "self-test"
"""A phase that leaves nothing, and is not recorded."""


class _Current(threading.local):
    phase = "store"
    """The phase to which the operations of a store belong in this thread."""
    held: tuple[Path, int] | None = None
    """The folder of :func:`during`, and its descriptor."""


_current: Final = _Current()


@contextlib.contextmanager
def during(phase: str, folder: Path | None = None) -> Iterator[None]:
    """The operations of stores that this thread carries out until the context ends belong to ``phase``.

    Below ``folder`` they reach what is in that directory now, whatever takes its name meanwhile, and follow no symbolic
    link. Raises :class:`StorageError` if it is no directory.
    """
    before = _current.phase, _current.held
    with contextlib.ExitStack() as opened:
        if folder is not None:
            try:
                descriptor = os.open(folder, _DIRECTORY)
            except OSError as error:
                why = f"opening {folder} failed: {error.strerror}"
                raise StorageError(error.errno, why, str(folder)) from error
            opened.callback(os.close, descriptor)
            if not presence.is_directory(_path_of(descriptor)):  # all below would look as if gone
                why = "/proc is not mounted, which deletions need"
                raise StorageError(errno.ENOENT, why, str(folder))
            _current.held = folder, descriptor
        _current.phase = phase
        try:
            yield
        finally:
            _current.phase, _current.held = before


@contextlib.contextmanager
def reached(path: Path) -> Iterator[str]:
    """``path`` itself; or, if it lies below the folder that :func:`during` holds, a path by the descriptor of that."""
    if _current.held is None or _current.held[0] not in path.parents:
        yield str(path)
        return
    folder, descriptor = _current.held
    with contextlib.ExitStack() as opened:
        *between, name = path.relative_to(folder).parts
        for each in between:
            descriptor = os.open(each, _DIRECTORY, dir_fd=descriptor)
            opened.callback(os.close, descriptor)
        yield f"{_path_of(descriptor)}/{name}"


def _path_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


@contextlib.contextmanager
def _operation(phase: str, name: str, path: Path, **more: Any) -> Iterator[str]:
    """Around one system call for ``path``, as it is :func:`reached`: its failpoints, and its record once it has
    returned.
    """
    phase = phase or _current.phase
    step()
    hit(f"{phase}.{name}.before")
    with reached(path) as within:
        yield within
    _trace(name, path, **more)
    hit(f"{phase}.{name}.after")


def make_directory(path: Path, phase: str = "") -> None:
    """Create a directory (mkdir(2)); raises FileExistsError."""
    with _operation(phase, "mkdir", path) as name:
        os.mkdir(name)


def write_new_file(path: Path, pieces: Iterable[Buffer], phase: str = "") -> None:
    """Create ``path``, which must not exist, of ``pieces``, and make its bytes (not its name) durable."""
    phase = phase or _current.phase
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.ExitStack() as opened:
        with _operation(phase, "create", path) as name:
            descriptor = os.open(name, flags, 0o644)
            opened.callback(os.close, descriptor)
        offset = 0
        for piece in pieces:
            step()
            left = memoryview(piece).cast("B")
            if not offset and left:
                hit(f"{phase}.write.before")
            while left:
                wrote = os.write(descriptor, left)
                _trace("write", path, offset=offset, data=left[:wrote])
                left, offset = left[wrote:], offset + wrote
            del piece, left  # its memory is free before the next is made
        hit(f"{phase}.write.after")
        _sync(descriptor, path, phase, "sync_file")


def rename(path: Path, target: Path, phase: str = "") -> None:
    """Replace ``target`` by ``path``, atomically (rename(2))."""
    with _operation(phase, "rename", path, to=str(target)) as old, reached(target) as new:
        os.rename(old, new)


def link(path: Path, target: Path, phase: str = "") -> None:
    """Make ``target`` another name of ``path``, a file or a symbolic link (link(2)); raises FileExistsError."""
    with _operation(phase, "link", path, to=str(target)) as old, reached(target) as new:
        os.link(old, new, follow_symlinks=False)


def rename_new(path: Path, target: Path, phase: str = "") -> None:
    """Rename ``path`` to ``target``, atomically (renameat2(2)); raises FileExistsError, or an errno of
    :data:`NO_RENAME_FLAGS`.
    """
    with _operation(phase, "rename", path, to=str(target)) as old, reached(target) as new:
        _renameat2(old, new, _RENAME_NOREPLACE)


def exchange(path: Path, target: Path, phase: str = "") -> None:
    """Exchange two entries, atomically (renameat2(2)); raises an errno of :data:`NO_RENAME_FLAGS`."""
    with _operation(phase, "exchange", path, to=str(target)) as old, reached(target) as new:
        _renameat2(old, new, _RENAME_EXCHANGE)


def _renameat2(old: str, new: str, flags: int) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), old)
    if renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), old, None, new)


def unlink(path: Path, phase: str = "") -> None:
    """Remove a file (unlink(2))."""
    with _operation(phase, "unlink", path) as name:
        os.unlink(name)


def remove_directory(path: Path, phase: str = "") -> None:
    """Remove a directory if it is empty (rmdir(2))."""
    with _operation(phase, "rmdir", path) as name:
        os.rmdir(name)


def remove_tree(path: Path, ignore_errors: bool = False) -> None:
    """Remove a directory with all that is in it; follows no symbolic link."""
    with contextlib.suppress(*[OSError] if ignore_errors else []), reached(path) as name:
        shutil.rmtree(name, ignore_errors)


def sync_directory(path: Path, phase: str = "") -> None:
    """Make the entries of a directory durable (fsync(2)), where the file system knows that."""
    with reached(path) as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(descriptor, path, phase, "sync_directory")
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
        if (device := os.fstat(descriptor).st_dev) not in _unsynced:
            _unsynced.add(device)
            logger.warning(
                "%s: the file system there has no fsync of a directory (%s), and saves go without it: after a crash of "
                "the server, the newest checkpoint may be missing",
                path,
                error.strerror,
            )
    finally:
        os.close(descriptor)


def _sync(descriptor: int, path: Path, phase: str, name: str) -> None:
    phase = phase or _current.phase
    step()
    hit(f"{phase}.{name}.before")
    number = f"{os.getpid()}.{next(_sync_ids)}"
    _trace("sync_begin", path, id=number)
    os.fsync(descriptor)
    _trace("sync", path, id=number)
    hit(f"{phase}.{name}.after")
