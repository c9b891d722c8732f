"""What becomes of a loop's committed checkpoints: the old ones are deleted, some are archived before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from dcp_datastates.checkpoints.first_rank import DEFAULT_TIMEOUT, from_first_of
from dcp_datastates.checkpoints.keep import Keep
from dcp_datastates.commit.group import commit_group
from dcp_datastates.config import check_count, parse_rate
from dcp_datastates.dcp.async_save import SaveHandle
from dcp_datastates.errors import CheckpointNotFoundError, ConfigurationError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.manager.save_tracker import SaveTracker
from dcp_datastates.manager.step_directories import StepDirectories
from dcp_datastates.process.futures import when_done
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.storage.object_path import Location
from dcp_datastates.tiers.archive import Archive, archive_of, archive_save, make_room
from dcp_datastates.tiers.run_identity import another_run, of_another_run

if TYPE_CHECKING:
    from dcp_datastates.weights.publish import Weights

_SPARE: Final = 1.05
"""Room for a save, in sizes of the one before."""


class Keeping:
    """Deletes, archives and publishes. The thread of the loop uses it; all ranks construct it.

    Args:
        steps: the checkpoints. Further tiers are archives.
        keep: the checkpoints to keep on the nearest tier; None: all.
        archive_every: archive every n-th save.
        archive_keep: the checkpoints to keep in each archive; None: all.
        publish: where weights are published; None: nowhere.

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
        archive_rate: int | str | None,
        *,
        publish: Weights | None,
    ) -> None:
        if len(steps.roots) == 1 and (archive_every, archive_keep, archive_rate) != (1, None, None):
            raise ConfigurationError(
                f"archive_every={archive_every!r}, archive_keep={archive_keep!r} and archive_rate={archive_rate!r} are "
                f"for an archive, and there is none: give archive=…, or leave them out"
            )
        self._steps = steps
        self._saves = saves
        self._keep = keep
        self._every = check_count("archive_every", archive_every)
        self._rate = parse_rate(archive_rate, name="archive_rate")
        self._count = 0
        self._newest: Location | None = None
        self._nbytes = 0  # of a checkpoint
        self._then: list[Callable[[], object] | None] = [None for _ in steps.roots[1:]]
        self._own: list[set[str]] = [set() for _ in steps.roots]
        """On each tier, the names of this run's checkpoints: only these are deleted."""
        if archive_keep is not None:
            rule = Keep.of(archive_keep)
            tiers = range(1, len(steps.roots))
            self._then = [partial(steps.delete_old, each, rule, self._own[each]) for each in tiers]
        self._rank_set = rank_set
        if publish is not None and not hasattr(publish, "publisher"):
            raise ConfigurationError(f"publish={publish!r} must be Weights(root)")
        self._publisher = (
            None if publish is None else publish.publisher(rank_set, self._request_deletions)
        )
        self._archives: list[Archive] = []
        self._another: int | None = None
        """Which archive is of another run."""
        for slow in steps.roots[1:]:
            self._archives.append(archive_of(slow, commit_group(rank_set)))
            self._archives[-1].beside = [each for each in steps.roots[1:] if each != slow]
        if self._archives:
            self._open_archives()
        self._deletes = rank_set.rank == 0 and (keep is not None or len(steps.roots) > 1)

    def _open_archives(self) -> None:
        fast, *slow = self._steps.roots
        check = partial(of_another_run, fast, slow)
        self._another = from_first_of(
            self._rank_set, check, "run", "the run's identity", DEFAULT_TIMEOUT
        )
        for archive in self._archives if self._another is None else []:
            archive.open(fast)

    def check(self) -> None:
        """Before a save: raises :class:`ConfigurationError` if an archive is another run's, or if no weights can be
        published. All ranks call this.
        """
        if self._publisher is not None:
            self._publisher.check()
        if self._another is not None:
            self._open_archives()
        if self._another is not None:
            raise another_run(self._steps.roots[0], self._steps.roots[1 + self._another])

    def adopt(self, names: Iterable[str]) -> None:
        """Checkpoints of these names are this run's, too: it goes on from them."""
        if self._deletes:
            for own in self._own:
                own.update(names)

    def make_room(self, seconds: float) -> None:
        """Before a save: where the nearest tier is full, delete what is archived there, or wait until more is; for at
        most ``seconds``.
        """
        if self._deletes and self._archives and self._nbytes:
            nbytes = int((len(self._saves.in_flight()) + 1) * _SPARE * self._nbytes)
            make_room(self._steps.roots[0], self._archives, nbytes, seconds)

    def begun(self, save: SaveOperation) -> None:
        """A save has begun, and is not planned yet: archive it if it is its turn, and publish its weights. Every rank
        calls this for every save.
        """
        # First: it holds what is committed before anything deletes it.
        if self._publisher is not None:
            self._publisher.follow(save)
        self._count += 1
        turns = self._archives if (self._count - 1) % self._every == 0 else []
        for archive, then in zip(turns, self._then, strict=bool(turns)):
            archived = archive_save(save, archive.slow, self._rate, then)
            # What is kept until then may be old.
            when_done(archived, lambda _: self._request_deletions())

    def follow(self, handle: SaveHandle) -> None:
        """A save is on its way."""
        if self._deletes:
            self._newest = handle.path
            self.adopt([handle.path.name])
            self._saves.when_committed(self._committed)

    def _request_deletions(self) -> None:
        if self._deletes:
            self._saves.deletions.request(self._committed)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all that is committed, and is to be archived or published, is; for at most ``seconds``, and then
        for what is to be deleted.
        """
        ends_at = None if seconds is None else time.monotonic() + seconds
        waits = [archive.wait for archive in self._archives]
        if self._publisher is not None:
            waits.append(self._publisher.wait)
        for wait in waits:
            wait(None if ends_at is None else max(0.0, ends_at - time.monotonic()))
        self._saves.deletions.wait()

    def close(self) -> None:
        """Give up what is not published."""
        if self._publisher is not None:
            self._publisher.close()

    def _committed(self) -> None:
        if self._archives and self._newest is not None:
            with contextlib.suppress(CheckpointNotFoundError):  # the newest save may have failed
                self._nbytes = open_committed(self._newest).nbytes
        if self._keep is not None:
            held = None if self._publisher is None else self._publisher.holds
            self._steps.delete_old(0, self._keep, self._own[0], held)
