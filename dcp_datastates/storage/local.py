"""Directories and small files on a local or shared file system, made durable step by step.

POSIX promises nothing about a name until its directory is synced: a created or renamed entry is
durable only after an ``fsync`` of the directory that holds it. The large files are the native
engine's business (``native/``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dcp_datastates.attempt import Attempt
from dcp_datastates.errors import ConfigurationError, StorageError

__all__ = [
    "attempts",
    "check_writable",
    "local_path",
    "make_directories",
    "publish",
    "remove_attempt",
    "sync_directories",
    "sync_directory",
]

METADATA_NAME = ".metadata"


def local_path(path: str | os.PathLike[str]) -> Path:
    """``path`` as an absolute :class:`~pathlib.Path`; URLs and other types are refused."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError(f"path={path!r} must be a str or os.PathLike of a directory")
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"path={path!r} must name a directory")
    if "://" in text:
        raise ConfigurationError(
            f"path={text!r} is a URL; only local and mounted file systems are supported"
        )
    return Path(os.path.abspath(text))


def check_writable(directory: Path) -> None:
    """Raise early if ``directory`` cannot become, or is not, a directory that this process may fill.

    Looks at the nearest parent that exists and creates nothing.
    """
    nearest = directory
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigurationError(
            f"path {str(directory)!r} cannot be a checkpoint directory: {str(nearest)!r} is a file"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise StorageError(
            13, f"no permission to create a checkpoint below {str(nearest)!r}", str(directory)
        )


@contextlib.contextmanager
def _explained(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            error.errno, f"{doing} failed: {os.strerror(error.errno or 0)}", str(path)
        ) from error


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable."""
    with _explained("fsync of directory", directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_directories(directory: Path) -> None:
    """Create ``directory`` and what is missing above it. Several ranks may race to do so."""
    with _explained("creating directory", directory):
        directory.mkdir(parents=True, exist_ok=True)


def sync_directories(directory: Path) -> list[Path]:
    """The directories to sync, in order, for the entries in and above ``directory`` to be durable.

    Parents that existed before count as well: another rank may have created them a moment ago and not
    have synced them yet. The walk ends with the file system's mount point.
    """
    chain = [directory]
    with _explained("stat", directory):
        device = directory.stat().st_dev
        for parent in directory.parents:
            if parent.stat().st_dev != device or not os.access(parent, os.R_OK):
                break
            chain.append(parent)
    return chain


def attempts(directory: Path) -> list[Attempt]:
    """The attempts that have a directory below ``directory``, oldest first."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(attempt for name in names if (attempt := Attempt.parse(name)))


def publish(directory: Path, attempt: Attempt, data: bytes) -> None:
    """Atomically make ``data`` the directory's ``.metadata``, and durable.

    Write a temporary file, sync it, rename it over ``.metadata``, sync the directory: a crash at
    any instant leaves the old ``.metadata`` or the new one, whole.
    """
    temporary = directory / f"{METADATA_NAME}.{attempt.name}.tmp"
    with _explained("publishing", directory / METADATA_NAME):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, directory / METADATA_NAME)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    sync_directory(directory)


def remove_attempt(directory: Path, attempt: Attempt) -> None:
    """Remove an attempt's directory and temporary metadata, as far as possible; never raises."""
    with contextlib.suppress(OSError):
        os.unlink(directory / f"{METADATA_NAME}.{attempt.name}.tmp")
    shutil.rmtree(directory / attempt.name, ignore_errors=True)
