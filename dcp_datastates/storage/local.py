"""Directories and small files on a local or shared file system, with the syncs that make them durable.

POSIX promises nothing about a name until its directory is synced: a created or renamed entry is durable only after an
``fsync`` of the directory that holds it. The native engine writes the large files (``native/``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import reprlib
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from dcp_datastates.errors import ConfigurationError, DataStatesError, StorageError
from dcp_datastates.storage import operations, presence
from dcp_datastates.storage.presence import NotAFileError
from dcp_datastates.text import size as show_size

METADATA_NAME: Final = ".metadata"

_SCHEME: Final = re.compile("(s3a?|gs|gcs|az|azure|adl|abfss?|hdfs|memory):")


def local_path(path: str | os.PathLike[str], below: str | None = None, name: str = "path") -> Path:
    """``path`` as an absolute :class:`~pathlib.Path`; refuses URLs, also those that a ``Path`` has made of one, and
    other types.

    ``~`` and ``~user`` at its beginning are home directories, as for fsspec and a shell. A relative path is relative to
    ``below``; None: to the working directory. ``name``: of the argument, for messages.

    Raises :class:`ConfigurationError`, or :class:`StorageError` if the working directory is gone.
    """
    given: object = path
    if not isinstance(given, (str, os.PathLike)):
        said, hint = f"={reprlib.repr(given)}", ""
        if isinstance(given, Mapping):
            said = f" is a {type(given).__name__}, and"
            hint = "; it is load(path, state) and save(state, path)"
        raise ConfigurationError(
            f"{name}{said} must be a str or os.PathLike of a directory, or a URL{hint}"
        )
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"{name}={path!r} must name a directory")
    if "://" in text:
        raise ConfigurationError(
            f"{name}={text!r} is a URL, and only a local or mounted directory works there; dcp_datastates.copy takes "
            f"checkpoints to a store"
        )
    if lost := [each for each in text.split("/") if _SCHEME.fullmatch(each)]:
        raise ConfigurationError(
            f"{name}={text!r} was a URL, which has lost a slash in a Path or by os.path: pass it as a str, such as "
            f"'{lost[0]}//bucket/run'"
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        user = text.partition("/")[0]
        raise ConfigurationError(
            f"{name}={text!r}: the home directory {user!r} is not known here; write './{text}' for a directory "
            f"of that name"
        )
    try:
        return Path(os.path.abspath(os.path.join(below or "", expanded)))
    except OSError as error:
        raise StorageError(
            error.errno, "the working directory is gone; pass an absolute path", text
        ) from error


def working_directory() -> str | None:
    """This process's present working directory; None if it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return None


def check_writable(directory: Path) -> None:
    """Raise early if this process cannot create ``directory`` or write to it; looks at the nearest that exists."""
    nearest = Path(os.path.realpath(directory))
    while not presence.is_there(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not presence.is_directory(nearest):
        raise ConfigurationError(
            f"path {str(directory)!r} cannot be a checkpoint directory: {str(nearest)!r} is a file"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        number, why = errno.EACCES, f"no permission to create a checkpoint below {str(nearest)!r}"
        with contextlib.suppress(OSError):
            if os.statvfs(nearest).f_flag & os.ST_RDONLY:
                number, why = errno.EROFS, f"{str(nearest)!r} is on a read-only file system"
        raise StorageError(number, why, str(directory))


def about_space(number: int | None, path: str | Path, nbytes: int) -> str:
    """Text to append to an error ``number`` from writing ``nbytes`` at ``path``; empty unless it is about space."""
    wanted = f"{show_size(nbytes)} were to be written, and " if nbytes else ""
    if number == errno.EDQUOT:
        return f"; {wanted}a quota is used up"
    if number != errno.ENOSPC:
        return ""
    with contextlib.suppress(OSError):
        status = os.statvfs(path if presence.is_directory(path) else Path(path).parent)
        no_inode = " (and no inode)" if not status.f_favail and status.f_files else ""
        return (
            f"; {wanted}{show_size(status.f_bavail * status.f_frsize)} are free there now{no_inode}"
        )
    return ""


@contextlib.contextmanager
def explained(doing: str, path: object, nbytes: int = 0) -> Iterator[None]:
    """Turn an OSError into a :class:`StorageError` that names the operation; leave errors of this package alone."""
    try:
        yield
    except DataStatesError:
        raise
    except OSError as error:
        text = f"{doing} failed: {os.strerror(error.errno or 0)}"
        space = about_space(error.errno, str(path), nbytes)
        raise StorageError(error.errno, text + space, str(path)) from error


def make_directories(directory: Path, phase: str = "plan") -> list[Path]:
    """Create ``directory`` and its missing parents; returns those that this process created, the innermost first.

    Several processes may race. Whether the directory exists is decided by creating it on the file system, not by a
    lookup that this machine may have cached.
    """
    with explained("creating directory", directory):
        return _made(directory, phase)


def _made(directory: Path, phase: str, has_parent: bool = False) -> list[Path]:
    try:
        operations.make_directory(directory, phase)
    except FileExistsError:
        if not presence.is_directory(directory):
            raise
        return []
    except FileNotFoundError:
        if has_parent:  # a file system in which nothing can be created, such as /proc
            raise
        above = _made(directory.parent, phase)
        return [*_made(directory, phase, has_parent=True), *above]
    return [directory]


def sync_directories(directory: Path) -> list[Path]:
    """The directories to sync, in order, for the entries in and above ``directory`` to be durable.

    This includes parents that existed before: another rank may have just created them, and not synced them yet. It ends
    with the file system's mount point.
    """
    chain = [directory]
    with explained("stat", directory):
        device = directory.stat().st_dev
        for parent in directory.parents:
            if parent.stat().st_dev != device or not os.access(parent, os.R_OK):
                break
            chain.append(parent)
    return chain


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a directory, or a link to one; also if that cannot be told: a look into it then raises."""
    try:
        return presence.is_directory(entry.path) if entry.is_symlink() else entry.is_dir()
    except OSError:
        return True


_KINDS: Final = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open the file at ``path`` for reading. Never waits for a pipe's other end, and never opens a device.

    Raises OSError: :class:`NotAFileError` if there is something other than a file.
    """
    try:
        _check_regular(_status_of(path), path)
    except OSError as error:
        if error.errno == errno.ELOOP and presence.is_link(path):
            raise _not_a_file("a symbolic link that leads back to itself", path) from None
        raise
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _status_of(path: str | os.PathLike[str]) -> os.stat_result:
    try:
        return os.stat(path)
    except FileNotFoundError:
        # An NFS client may remember for half a minute that there was none; opening the directory asks the server.
        parent = os.path.dirname(os.path.abspath(path))
        os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return os.stat(path)


def read_at(descriptor: int, offset: int, into: memoryview) -> int:
    """Fill ``into`` from byte ``offset`` of a file; returns how many bytes there are: fewer at its end."""
    done = 0
    while done < len(into):
        read = os.preadv(descriptor, [into[done:]], offset + done)
        if not read:
            break
        done += read
    return done


def drop_cached(descriptor: int, offset: int = 0, nbytes: int = 0) -> None:
    """Advise the system to forget a file's pages (0: all from ``offset``). Advice: its failure matters to nothing."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _not_a_file(_KINDS.get(stat.S_IFMT(status.st_mode), "something else"), path)


def _not_a_file(kind: str, path: str | os.PathLike[str]) -> NotAFileError:
    return NotAFileError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))
