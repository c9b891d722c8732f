"""What becomes of a loop's committed checkpoints: the old ones are deleted, some are archived before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from dcp_datastates.checkpoints.first_rank import DEFAULT_TIMEOUT, from_first_of
from dcp_datastates.checkpoints.keep import Keep
from dcp_datastates.commit.groups import commit_group
from dcp_datastates.config import parse_rate
from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.errors import CheckpointNotFoundError, ConfigurationError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.manager.save_tracker import SaveTracker
from dcp_datastates.manager.step_directories import StepDirectories
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.storage.object_path import Location
from dcp_datastates.tiers.archive import Archive, archive_of
from dcp_datastates.tiers.eviction import make_room
from dcp_datastates.tiers.run_identity import check_one_run

__all__ = ["ArchiveRule", "Keeping"]

_SPARE: Final = 1.05
"""Room for a save, in sizes of the one before."""


class ArchiveRule:
    """Which saves of a loop are archived, and which of them stay there. One thread uses it; all ranks construct it.

    Args:
        steps: its second tier is the archive.
        every: archive every n-th save.
        keep: the checkpoints to keep in the archive; None: all.
        rate: of each rank.

    Raises :class:`ConfigurationError` for an argument that cannot work, and for tiers of two runs.
    """

    def __init__(
        self,
        steps: StepDirectories,
        rank_set: RankSet,
        every: int,
        keep: int | Keep | None,
        rate: int | str | None,
    ) -> None:
        fast, slow = steps.roots
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigurationError(f"archive_every={every!r} must be a whole number, 1 or more")
        self._every = every
        self._saves = 0
        self._then: Callable[[], object] | None = None
        if keep is not None:
            self._then = partial(steps.delete_old, 1, Keep.of(keep), lambda path: False)
        self.archive: Final[Archive] = archive_of(slow, commit_group(rank_set))
        self.archive.set_rate(parse_rate(rate, name="archive_rate"))
        check = partial(check_one_run, fast, slow)
        from_first_of(rank_set, check, "run", "the run's identity", DEFAULT_TIMEOUT)
        self.archive.open(fast)

    def take(self, handle: SaveHandle) -> Future[None] | None:
        """A save has begun: archive it, if it is its turn, and return its future."""
        self._saves += 1
        if (self._saves - 1) % self._every:
            return None
        return handle.archive(self.archive, self._then)


class Keeping:
    """Deletes and archives. The thread of the loop uses it.

    Args:
        keep: the checkpoints to keep on the nearest tier; None: all.
        archiving: the rule of the archive; None if there is none.
        is_first: whether this rank deletes.
    """

    def __init__(
        self,
        steps: StepDirectories,
        saves: SaveTracker,
        keep: Keep | None,
        archiving: ArchiveRule | None,
        is_first: bool,
    ) -> None:
        self._steps = steps
        self._saves = saves
        self._keep = keep
        self._archiving = archiving
        self._deletes = is_first and (keep is not None or archiving is not None)
        self._newest: Location | None = None
        self._nbytes = 0  # of a checkpoint

    def make_room(self, seconds: float) -> None:
        """Before a save: where the nearest tier is full, delete what is archived there, or wait until more is; for at
        most ``seconds``.
        """
        fast, archiving = self._steps.roots[0], self._archiving
        if self._deletes and archiving is not None and self._nbytes and isinstance(fast, Path):
            saves = len(self._saves.in_flight()) + 1
            make_room(fast, archiving.archive, int(saves * _SPARE * self._nbytes), seconds)

    def follow(self, handle: SaveHandle) -> None:
        """A save has begun. Every rank calls this for every save."""
        archived = None if self._archiving is None else self._archiving.take(handle)
        if self._deletes:
            self._newest = handle.path
            self._saves.when_committed(self._committed)
            if archived is not None:  # what was held until then may be old
                archived.add_done_callback(lambda _: self._saves.deletions.request(self._committed))

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all that is committed, and is to be archived, is; for at most ``seconds``, and then for what is to
        be deleted.
        """
        if self._archiving is not None:
            self._archiving.archive.wait(seconds)
        self._saves.deletions.wait()

    def _committed(self) -> None:
        archiving = self._archiving
        if archiving is not None and self._newest is not None:
            with contextlib.suppress(CheckpointNotFoundError):  # the newest save may have failed
                self._nbytes = open_committed(self._newest).nbytes
        if self._keep is not None:
            self._steps.delete_old(
                0, self._keep, lambda path: archiving is not None and archiving.archive.holds(path)
            )
