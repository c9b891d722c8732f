"""What becomes of a loop's committed checkpoints: the old ones are deleted, some are archived before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Final

from dcp_datastates.checkpoints.first_rank import DEFAULT_TIMEOUT, from_first_of
from dcp_datastates.checkpoints.keep import Keep
from dcp_datastates.commit.group import commit_group
from dcp_datastates.config import check_count
from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.errors import CheckpointNotFoundError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.manager.save_tracker import SaveTracker
from dcp_datastates.manager.step_directories import PREFIX, StepDirectories
from dcp_datastates.process.futures import when_done
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.storage.job_notes import RETENTION_NAME, Note, leave
from dcp_datastates.storage.object_path import Location
from dcp_datastates.tiers.archive import Archive, archive_of, archive_save, make_room
from dcp_datastates.tiers.run_identity import another_run, check_one_run

_SPARE: Final = 1.05
"""Room for a save, in sizes of the one before."""


class Keeping:
    """Deletes and archives. The thread of the loop uses it; all ranks construct it.

    Args:
        steps: the checkpoints. A second tier is the archive.
        keep: the checkpoints to keep on the nearest tier; None: all.
        archive_every: archive every n-th save.
        archive_keep: the checkpoints to keep in the archive; None: all.

    Raises :class:`ConfigurationError` for an argument that cannot work, and for tiers of two runs.
    """

    def __init__(
        self,
        steps: StepDirectories,
        saves: SaveTracker,
        rank_set: RankSet,
        keep: Keep | None,
        archive_every: int,
        archive_keep: int | Keep | None,
        archive_rate: int,
    ) -> None:
        self._steps = steps
        self._saves = saves
        self._keep = keep
        self._every = check_count("archive_every", archive_every)
        self._rate = archive_rate
        self._count = 0
        self._newest: Location | None = None
        self._nbytes = 0  # of a checkpoint
        self._then: Callable[[], object] | None = None
        self._own: list[set[str]] = [set() for _ in steps.roots]
        """On each tier, the names of this run's checkpoints: only these are deleted."""
        if archive_keep is not None:
            self._then = partial(steps.delete_old, 1, Keep.of(archive_keep), self._own[-1])
        self._rank_set = rank_set
        self._archive: Archive | None = None
        self._is_one_run = len(steps.roots) == 1
        for slow in steps.roots[1:]:
            self._archive = archive_of(slow, commit_group(rank_set))
            self._open_archive()
        self._deletes = rank_set.rank == 0 and (keep is not None or len(steps.roots) > 1)
        self._is_noted = rank_set.rank != 0

    def _open_archive(self) -> None:
        fast, slow = self._steps.roots
        check = partial(check_one_run, fast, slow)
        self._is_one_run = from_first_of(
            self._rank_set, check, "run", "the run's identity", DEFAULT_TIMEOUT
        )
        if self._is_one_run and self._archive is not None:
            self._archive.open(fast)

    def check(self) -> None:
        """Before a save: raises :class:`ConfigurationError` if the archive is another run's. All ranks call this."""
        if not self._is_one_run:
            self._open_archive()
        if not self._is_one_run:
            raise another_run(*self._steps.roots)

    def adopt(self, names: Iterable[str]) -> None:
        """Checkpoints of these names are this run's, too: it goes on from them."""
        if self._deletes:
            for own in self._own:
                own.update(names)

    def make_room(self, seconds: float) -> None:
        """Before a save: where the nearest tier is full, delete what is archived there, or wait until more is; for at
        most ``seconds``.
        """
        fast, archive = self._steps.roots[0], self._archive
        if self._deletes and archive is not None and self._nbytes:
            saves = len(self._saves.in_flight()) + 1
            make_room(fast, archive, int(saves * _SPARE * self._nbytes), seconds)

    def archive(self, save: SaveOperation) -> None:
        """A save has begun, and is not planned yet: archive it if it is its turn. Every rank calls this for every
        save.
        """
        self._count += 1
        if self._archive is not None and (self._count - 1) % self._every == 0:
            archived = archive_save(save, self._archive.slow, self._rate, self._then)
            if self._deletes:  # what is kept until then may be old
                when_done(archived, lambda _: self._saves.deletions.request(self._committed))

    def follow(self, handle: SaveHandle) -> None:
        """A save is on its way."""
        if not self._is_noted:
            self._saves.when_committed(self._note_rules)
        if self._deletes:
            self._newest = handle.path
            self.adopt([handle.path.name])
            self._saves.when_committed(self._committed)

    def _note_rules(self) -> None:
        self._is_noted = True
        rules = None if self._keep is None else {"prefix": PREFIX, **asdict(self._keep)}
        leave(self._steps.roots[0], RETENTION_NAME, Note(rules=rules))

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all that is committed, and is to be archived, is; for at most ``seconds``, and then for what is to
        be deleted.
        """
        if self._archive is not None:
            self._archive.wait(seconds)
        self._saves.deletions.wait()

    def _committed(self) -> None:
        if self._archive is not None and self._newest is not None:
            with contextlib.suppress(CheckpointNotFoundError):  # the newest save may have failed
                self._nbytes = open_committed(self._newest).nbytes
        if self._keep is not None:
            self._steps.delete_old(0, self._keep, self._own[0])
