"""Directories and small files on a local or shared file system, made durable step by step.

POSIX promises nothing about a name until its directory is synced: a created or renamed entry is
durable only after an ``fsync`` of the directory that holds it. The large files are the native
engine's business (``native/``).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dcp_datastates.attempt import Attempt
from dcp_datastates.errors import CommitOutcomeUnknown, ConfigurationError, StorageError
from dcp_datastates.storage import operations

__all__ = [
    "METADATA_NAME",
    "Signature",
    "attempts",
    "check_writable",
    "claim",
    "local_path",
    "make_directories",
    "publish",
    "rank_of",
    "remove_attempt",
    "remove_files",
    "signature",
    "sync_directories",
]

METADATA_NAME: Final = ".metadata"

_DATA_FILE = re.compile(r"r(\d{5,})-\d+\.safetensors")


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


def make_directories(directory: Path) -> None:
    """Create ``directory`` and what is missing above it. Several processes may race to do so."""
    with _explained("creating directory", directory):
        missing = []
        while not directory.is_dir():
            missing.append(directory)
            directory = directory.parent
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                operations.make_directory(path, "plan")


def claim(directory: Path, attempt: Attempt) -> bool:
    """Create the attempt's directory; False if it exists: then it is somebody else's."""
    with _explained("creating directory", directory / attempt.name):
        try:
            operations.make_directory(directory / attempt.name, "plan")
        except FileExistsError:
            return False
    return True


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


@dataclass(frozen=True)
class Signature:
    """Which file a ``.metadata`` is: every publication makes another one."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int


def signature(directory: Path) -> Signature | None:
    """Of the committed checkpoint in ``directory``; None if there is none."""
    with _explained("stat", directory / METADATA_NAME):
        try:
            # Opened, so that a network file system asks its server.
            descriptor = os.open(directory / METADATA_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    return Signature(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def publish(directory: Path, attempt: Attempt, data: bytes) -> None:
    """Atomically make ``data`` the directory's ``.metadata``, and durable.

    Write a temporary file, sync it, rename it over ``.metadata``, sync the directory: a crash at
    any instant leaves the old ``.metadata`` or the new one, whole. Raises :class:`StorageError`; then
    the old one is there. :class:`CommitOutcomeUnknown` if the new one has, or may have, taken its place
    and could not be made durable.
    """
    temporary = _temporary(directory, attempt)
    renaming = False
    with _explained("publishing", directory / METADATA_NAME):
        try:
            operations.write_new_file(temporary, data, "publish")
            renaming = True
            operations.rename(temporary, directory / METADATA_NAME, "publish")
            operations.sync_directory(directory, "publish")
        except OSError as error:
            if renaming and not os.path.lexists(temporary):
                raise CommitOutcomeUnknown(
                    f"{directory / METADATA_NAME} names attempt {attempt.name}, but making that durable "
                    f"failed: {error.strerror}; it loads now, and may be the old one again after a crash"
                ) from error
            with contextlib.suppress(OSError):  # else the next save's cleanup does it
                os.unlink(temporary)
            raise


def _temporary(directory: Path, attempt: Attempt) -> Path:
    return directory / f"{METADATA_NAME}.{attempt.name}.tmp"


def rank_of(name: str) -> int | None:
    """The rank that writes a data file of this name; None for a name that this package does not give."""
    match = _DATA_FILE.fullmatch(name)
    return int(match[1]) if match else None


def remove_files(
    directory: Path, attempt: Attempt, rank: int, world: int, phase: str = "cleanup"
) -> None:
    """Remove the files of ``attempt`` that are ``rank``'s to remove, as far as possible; never raises.

    Of ``world`` ranks, each removes those whose number is its own modulo ``world`` (an earlier job may
    have had more ranks), and only names that this package gives. The last one to find the attempt's
    directory empty removes it; anything foreign in it keeps it.
    """
    folder = directory / attempt.name
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    for name in names:
        owner = rank_of(name)
        if owner is not None and owner % world == rank:
            with contextlib.suppress(OSError):
                operations.unlink(folder / name, phase)
    if rank == 0 and _temporary(directory, attempt).exists():
        with contextlib.suppress(OSError):
            operations.unlink(_temporary(directory, attempt), phase)
    with contextlib.suppress(OSError):
        operations.remove_directory(folder, phase)


def remove_attempt(directory: Path, attempt: Attempt, phase: str = "cleanup") -> None:
    """:func:`remove_files` of all ranks."""
    remove_files(directory, attempt, 0, 1, phase)
