"""A directory of checkpoints: which are there, and which is the newest.

Newer is what has the greater attempt (:class:`~dcp_datastates.storage.attempt.Attempt`) in its metadata: attempts are
ordered by when their job and their save began, whatever directories are called. Copies have the same
attempt; among them the greater name is the newer, in natural order (``step-10`` is after ``step-9``).
"""

from __future__ import annotations

import heapq
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import total_ordering
from pathlib import Path

from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    ForeignCheckpointError,
    StorageError,
    UnreadableMetadataError,
)
from dcp_datastates.io.committed import Committed, open_committed
from dcp_datastates.storage import attempts, local
from dcp_datastates.storage.attempt import Attempt

__all__ = [
    "Found",
    "checkpoints",
    "committed_in",
    "directories",
    "is_committed",
    "natural_order",
    "newest_first",
    "open_found",
    "step_of",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint of this package in a directory of checkpoints."""

    path: Path
    attempt: Attempt
    """The committed one; where the metadata do not say, the newest whose directory is there."""
    committed: Committed | None
    """None if the metadata cannot be read."""
    problem: str | None = None
    """Why not."""
    is_damaged: bool = False
    """Whether that is because its metadata are damaged, rather than out of reach or of another version."""


def natural_order(name: str) -> list[int | str]:
    """A sort key: runs of digits compare as numbers."""
    return [
        int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", name))
    ]


def step_of(name: str) -> int | None:
    """The number that a checkpoint's name ends in."""
    match = re.search(r"[0-9]+$", name)
    return int(match[0]) if match else None


def directories(root: Path) -> list[Path]:
    """The directories in ``root``, symbolic links to directories too, in natural order.

    None if there is no ``root``. Raises :class:`ConfigurationError` if it is something else than a
    directory, :class:`StorageError` if it cannot be read.
    """
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise ConfigurationError(
            f"root={str(root)!r} is a file; pass the directory that the checkpoints are saved in"
        ) from None
    except OSError as error:
        raise StorageError(
            error.errno, f"listing checkpoints failed: {error.strerror}", str(root)
        ) from error
    return [root / name for name in sorted(names, key=natural_order)]


def checkpoints(root: Path) -> list[Path]:
    """The directories in ``root`` where a checkpoint is committed, anybody's, in natural order.

    Raises as :func:`directories`; and :class:`ConfigurationError` if ``root`` is itself a checkpoint.
    """
    found = committed_in(root)
    if is_committed(root):
        if not found:
            raise ConfigurationError(
                f"root={str(root)!r} is itself a checkpoint; pass the directory that it lies in "
                f"({str(root.parent)!r}), or load it as it is"
            )
        logger.warning("%s is itself a checkpoint; looking only at those below it", root)
    return found


def committed_in(root: Path) -> list[Path]:
    """The same, also where ``root`` is itself a checkpoint. Raises as :func:`directories`."""
    return [path for path in directories(root) if is_committed(path)]


def is_committed(path: Path) -> bool:
    """Whether a checkpoint is committed at ``path``, of this package or not."""
    return os.path.lexists(path / local.METADATA_NAME)


def newest_first(paths: Iterable[Path]) -> Iterator[Found]:
    """Those of the checkpoints at ``paths`` that are this package's, newest first.

    Opens only as many as are asked for: the attempts that have a directory in a checkpoint say how new it
    can be at most. What vanishes meanwhile is left out.
    """
    heap = [_Rank(_newest_possible(path), path, None) for path in paths]
    heapq.heapify(heap)
    while heap:
        top = heapq.heappop(heap)
        if top.found is not None:
            yield top.found
            continue
        found = open_found(top.path)
        if found is not None:
            heapq.heappush(heap, _Rank(found.attempt, top.path, found))


_NEWEST = Attempt(2**64, 0)


def _newest_possible(path: Path) -> Attempt:
    # Without any directory, that of the committed attempt is gone, or was never needed (nothing was
    # saved): it must be opened to know.
    return max(attempts.present(path), default=_NEWEST)


@total_ordering
class _Rank:
    """Sorts newest first; what has been opened after what might be as new."""

    def __init__(self, attempt: Attempt, path: Path, found: Found | None) -> None:
        self._attempt = attempt
        # A symbolic link is behind what it points to, if that lies here too.
        self._tie = (not path.is_symlink(), natural_order(path.name))
        self.path = path
        self.found = found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rank) and self._key() == other._key()

    def __lt__(self, other: _Rank) -> bool:
        return self._key() > other._key()

    def _key(self) -> tuple[Attempt, bool, tuple[bool, list[int | str]]]:
        return self._attempt, self.found is None, self._tie


def open_found(path: Path) -> Found | None:
    """What is committed at ``path``; None for what is not, or no longer, a checkpoint of this package."""
    try:
        committed = open_committed(path)
    except ForeignCheckpointError:
        logger.debug("%s: a stock checkpoint, left alone", path)
        return None
    except CheckpointNotFoundError:
        return None
    except (CheckpointCorruptError, StorageError) as error:
        present = attempts.present(path)
        if not present:
            logger.debug("%s: not a checkpoint of this package: %s", path, error)
            return None
        damaged = isinstance(error, CheckpointCorruptError)
        unknown = isinstance(error, UnreadableMetadataError)  # a newer release may have written it
        return Found(path, present[-1], None, str(error), damaged and not unknown)
    return Found(path, committed.note.attempt, committed)
