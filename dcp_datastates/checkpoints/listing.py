"""Lists a directory of checkpoints, newest first.

A checkpoint is newer if its metadata have the greater attempt (:class:`~dcp_datastates.storage.attempt.Attempt`):
attempts are ordered by the start of their job and of their save, regardless of directory names. Copies have equal
attempts; among copies, the greater name counts as newer, in natural order (``step-10`` is after ``step-9``).
"""

from __future__ import annotations

import bisect
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Final

from dcp_datastates.checkpoints.inventory import is_link, names_at
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    ForeignCheckpointError,
    StorageError,
    UnreadableMetadataError,
)
from dcp_datastates.io.committed import Committed, open_committed
from dcp_datastates.process.forks import enter
from dcp_datastates.storage import attempts, presence
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.local import METADATA_NAME
from dcp_datastates.storage.object_path import Location, ObjectPath, stored
from dcp_datastates.storage.presence import NotAFileError

logger = logging.getLogger(__name__)

_NEWEST: Final = Attempt(2**64, 0)
"""Greater than every attempt's."""

_LOST: Final = "lost+found"
"""A directory of the file system's own, at its root, which only the superuser may read."""


def natural_order(name: str) -> list[int | str]:
    """A sort key: runs of digits compare as numbers."""
    return [
        int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", name))
    ]


def directories(root: Location) -> list[Location]:
    """The directories in ``root``, symbolic links to directories too, in natural order.

    Empty if ``root`` does not exist. Raises :class:`ConfigurationError` if ``root`` is not a directory,
    :class:`StorageError` if it cannot be read.
    """
    enter("looking for checkpoints")
    place = stored(root)
    listing = place.store.list(place.key)
    if not (listing.folders or listing.objects or listing.links):
        if not place.is_local:
            presence.check_answers(place.store, place.key)
        elif presence.is_file(str(place)):
            raise ConfigurationError(
                f"root={str(root)!r} is a file; pass the directory that the checkpoints are saved in"
            )
    names = [*listing.folders, *listing.links]
    mine = (name for name in names if name not in (_LOST, attempts.INDEX_NAME))
    return [root / name for name in sorted(mine, key=natural_order)]


def checkpoints(
    root: Location, among: Callable[[Location], bool] = lambda path: True
) -> list[Location]:
    """The directories in ``root`` with a committed checkpoint, of this package or another program, in natural order:
    of those that ``among`` takes, and no others are judged.

    Raises as :func:`directories`; and :class:`ConfigurationError` if ``root`` is itself a checkpoint.
    """
    return committed_among(filter(among, candidates(root)))


def candidates(root: Location) -> list[Location]:
    """The directories in ``root`` that may have a checkpoint, by their names alone. Raises as :func:`checkpoints`."""
    there = directories(root)
    found = [path for path in there if Attempt.parse(path.name) is None]
    # A store is not asked for more than its list.
    if (stored(root).is_local or len(found) < len(there)) and attempts.is_taken(root):
        if not committed_among(found):
            raise ConfigurationError(
                f"root={str(root)!r} is itself a checkpoint; pass the directory that it lies in "
                f"({str(root.parent)!r}), or load it as it is"
            )
        logger.warning("%s is itself a checkpoint; looking only at those below it", root)
    return found


def committed_among(paths: Iterable[Location]) -> list[Location]:
    """Those of ``paths`` with a committed checkpoint, in their order. Raises :class:`StorageError`."""
    there = list(paths)
    return list(compress(there, presence.look_at_each(attempts.is_taken, there, few=1)))


# ---- newest first ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A checkpoint of this package in a directory of checkpoints."""

    path: Location
    attempt: Attempt
    """The committed attempt; if the metadata cannot be read, one that no attempt committed there exceeds."""
    committed: Committed | None
    """None if the metadata cannot be read."""
    problem: str | None = None
    """Why the metadata cannot be read."""
    is_damaged: bool = False
    """Whether the metadata are damaged, rather than inaccessible or of another version."""
    error: StorageError | None = None
    """Why it cannot be judged whether a checkpoint is there, and which: storage does not show its metadata."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers that the save was given; none if the metadata cannot be read."""
        return {} if self.committed is None else self.committed.note.metrics


def newest_first(paths: Iterable[Location]) -> Iterator[Found]:
    """This package's checkpoints among those at ``paths``, newest first.

    Opens only as many as the caller consumes: the attempt directories in a checkpoint bound how new it can be.
    Checkpoints that vanish meanwhile are skipped. A place that cannot be judged comes before all that may be older.
    """
    unopened = _newest_possible(paths)
    unopened.sort(key=lambda each: each[0])
    opened: list[Found] = []  # the newest is the last, too
    while unopened or opened:
        if opened and not (unopened and unopened[-1][0] >= opened[-1].attempt):
            yield opened.pop()
        elif (found := open_found(unopened.pop()[1])) is not None:
            bisect.insort(opened, found, key=_age)


def _newest_possible(paths: Iterable[Location]) -> list[tuple[Attempt, Location]]:
    """Each of ``paths`` with an attempt that none committed there exceeds, from names: a store's by one request."""

    @functools.cache
    def indexed(root: ObjectPath) -> dict[str, Attempt]:
        # The first entry of a name is its newest.
        return {entry.name: entry.attempt for entry in reversed(attempts.entries(root))}

    def bound(path: Location) -> Attempt | None:
        place = stored(path)
        if place.is_local:
            return _newest_attempt(path)
        # Other tools copy checkpoints without an entry in the index.
        return indexed(place.parent).get(path.name, _NEWEST)

    return [(newest, path) for path in paths if (newest := bound(path)) is not None]


def _newest_attempt(path: Location) -> Attempt | None:
    """An attempt that none committed at ``path`` exceeds, as far as the names there tell; None if nothing there is of a
    checkpoint.
    """
    try:
        if found := attempts.present(path):
            return found[-1]
        return _NEWEST if METADATA_NAME in names_at(path) else None
    except StorageError:
        return _NEWEST


def _age(found: Found) -> tuple[Attempt, bool, list[int | str]]:
    # A symbolic link comes after its target, if that is in the same directory.
    is_original = found.error is not None or not is_link(found.path)
    return found.attempt, is_original, natural_order(found.path.name)


@functools.lru_cache(maxsize=1000)  # once for each, and not at every save beside it
def _say_left_out(path: Location, problem: str) -> None:
    logger.warning("%s is left out, for it is no checkpoint of this package: %s", path, problem)


def open_found(path: Location) -> Found | None:
    """The checkpoint at ``path``; None if it is none of this package. :attr:`Found.error` if that cannot be told."""
    try:
        return _opened(path)
    except StorageError as error:
        return Found(path, _newest_attempt(path) or _NEWEST, None, str(error), error=error)


def _opened(path: Location) -> Found | None:
    try:
        committed = open_committed(path)
    except ForeignCheckpointError:
        logger.debug("%s: a stock checkpoint, left alone", path)
        return None
    except CheckpointNotFoundError:
        return None
    except (CheckpointCorruptError, NotAFileError) as problem:
        present = attempts.present(path)
        if not present:
            _say_left_out(path, str(problem))
            return None
        damaged = isinstance(problem, CheckpointCorruptError)
        unknown = isinstance(
            problem, UnreadableMetadataError
        )  # a newer release may have written it
        return Found(path, present[-1], None, str(problem), damaged and not unknown)
    return Found(path, committed.note.attempt, committed)
