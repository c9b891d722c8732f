"""Finds the checkpoint to resume from: the newest intact one, the same on every rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, get_args

import torch.distributed as dist

from dcp_datastates.checkpoints.first_rank import DEFAULT_TIMEOUT, from_first_rank
from dcp_datastates.checkpoints.listing import Found, checkpoints, newest_first, open_found
from dcp_datastates.checkpoints.verify import verify as verify_bytes
from dcp_datastates.errors import ConfigurationError, DataStatesError
from dcp_datastates.format.metadata import FileRecord
from dcp_datastates.io.committed import Committed, wrong_size
from dcp_datastates.storage import local

__all__ = ["Verification", "check_verification", "flaw", "latest", "latest_here"]

logger = logging.getLogger(__name__)

Verification = Literal["metadata", "structure", "full"]

_STAT_THREADS: Final = 8
"""Threads that stat files: a shared file system takes a millisecond per file."""

_REPLACEMENTS: Final = 3


def latest(
    root: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    verify: Verification = "structure",
    timeout: float = DEFAULT_TIMEOUT,
) -> Path | None:
    """The newest committed checkpoint in the directory ``root``; None if there is none.

    The newest checkpoint is the one saved last, according to the attempt in its metadata, regardless of its name. If a
    checkpoint does not pass, a warning in the log says why, and the next older one is tried. Checkpoints of stock DCP
    are ignored.

    Every rank of ``process_group`` (default: all ranks) calls this; the first rank searches, and all return its result
    or raise its error. No collective runs on the group.

    Args:
        root: The directory that contains the checkpoints' directories. It need not exist yet.
        process_group: The ranks that take part.
        verify: The check that a checkpoint must pass. ``"metadata"``: its metadata can be read. ``"structure"``: also,
            every data file is there, with its exact size. ``"full"``: also, every stored byte matches its checksum;
            this reads all files, so allow for it in ``timeout``.
        timeout: Seconds for which the other ranks wait for the first.

    Raises:
        ConfigurationError: ``root`` is a file, or is itself a checkpoint; an option cannot work.
        StorageError: ``root`` cannot be read.
        NoAnswerError: the first rank did not answer in time.
    """
    directory = local.local_path(root)
    check_verification(verify)
    return from_first_rank(
        lambda: latest_here(directory, verify),
        "latest",
        "the latest checkpoint",
        process_group,
        timeout,
    )


def check_verification(verify: str) -> None:
    """Raise :class:`ConfigurationError` unless ``verify`` is a :data:`Verification`."""
    if verify not in get_args(Verification):
        raise ConfigurationError(
            f"verify={verify!r} must be one of {', '.join(map(repr, get_args(Verification)))}"
        )


def latest_here(
    root: Path, verify: Verification, among: Callable[[Path], bool] = lambda path: True
) -> Path | None:
    """:func:`latest` in this process alone, of the directories that ``among`` takes."""
    for found in newest_first(filter(among, checkpoints(root))):
        problem = flaw(found, verify)
        if problem is None:
            return found.path
        logger.warning("leaving out checkpoint %s: %s", found.path, problem)
    return None


def flaw(found: Found, verify: Verification) -> str | None:
    """Why a checkpoint does not pass; None if it does.

    If a save replaces the checkpoint during the check, it is checked again.
    """
    for _ in range(_REPLACEMENTS):
        problem = _flaw(found, verify)
        if problem is None:
            return None
        now = open_found(found.path)
        if now is None:
            return "it was deleted meanwhile"
        if now.attempt == found.attempt:
            return problem
        found = now
    return "it is being replaced all the time"


def _flaw(found: Found, verify: Verification) -> str | None:
    if found.committed is None:
        return found.problem
    if verify == "metadata":
        return None
    if verify == "structure":
        return _missing(found.path, found.committed)
    try:
        damages = verify_bytes(found.path).damages
    except DataStatesError as error:
        return str(error)
    if not damages:
        return None
    more = f" (and {len(damages) - 1} more)" if len(damages) > 1 else ""
    return f"{damages[0].file}: {damages[0].problem}{more}"


def _missing(directory: Path, committed: Committed) -> str | None:
    """The problem of the first data file that is missing or has another size; None if there is none."""

    def look(record: FileRecord) -> str | None:
        try:
            problem = wrong_size(record, os.stat(directory / record.relative_path).st_size)
        except (FileNotFoundError, NotADirectoryError):
            problem = "missing"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        return problem and f"{record.relative_path}: {problem}"

    with ThreadPoolExecutor(_STAT_THREADS) as executor:
        return next(filter(None, executor.map(look, committed.note.files.values())), None)
