"""The checkpoints of a run: directories with a number in their names, such as ``root/step-N``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from typing import Final

from dcp_datastates.checkpoints.find import Verification, flaw, newest_whole
from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.checkpoints.keep import Keep
from dcp_datastates.checkpoints.listing import Found, checkpoints, directories, newest_first
from dcp_datastates.checkpoints.retention import retain_here
from dcp_datastates.errors import CheckpointCorruptError, ForeignCheckpointError
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

PREFIX: Final = "step-"


def number_of(path: Location, prefix: str) -> int:
    """The number of a directory whose name is ``prefix`` and a number; -1 for any other."""
    match = re.fullmatch(re.escape(prefix) + "([0-9]+)", path.name)
    return int(match[1]) if match else -1


def newest_numbered(
    folder: Location,
    prefix: str,
    is_stock: Callable[[Location], bool],
    verify: Verification = "structure",
    leave_out: Collection[str] = (),
) -> Location | None:
    """The newest checkpoint of this package that passes ``verify``; or that of a framework's own with the highest
    number, if it is higher. None if there is none. The first rank looks; all ranks call this. Raises the errors of
    :func:`~dcp_datastates.latest`.

    Args:
        prefix: of the directories' names, before the number. Others do not count.
        is_stock: whether a checkpoint of the framework's own is in a directory.
        leave_out: names of directories that do not count: of checkpoints that could not be loaded.
    """

    def look() -> str | None:
        def is_numbered(path: Location) -> bool:
            return number_of(path, prefix) >= 0

        newest, damaged = None, None
        try:
            newest = next(iter(newest_whole([folder], verify, is_numbered, leave_out)), None)
        except CheckpointCorruptError as error:
            damaged = error
        highest = -1 if newest is None else number_of(newest, prefix)
        for path in reversed(directories(folder)):
            number = number_of(path, prefix)
            if number > highest and path.name not in leave_out and is_stock(path):
                return path.name
        if newest is None and damaged is not None:
            raise damaged
        return None if newest is None else newest.name

    name = from_first_rank(look, "newest", "the newest checkpoint")
    return None if name is None else folder / name


class StepDirectories:
    """The checkpoints below ``roots``, a run's tiers, the nearest first. Has no state: it asks storage."""

    def __init__(self, roots: Sequence[Location], verify: Verification) -> None:
        self.roots: Final = tuple(roots)
        self._verify: Verification = verify

    def path(self, step: int) -> Location:
        """The directory to which ``step`` is saved, on the nearest tier."""
        return self.roots[0] / f"{PREFIX}{step}"

    def places(self, name: str) -> list[Location]:
        """The directory of the checkpoint ``name`` on each tier."""
        return [root / name for root in self.roots]

    def name_of(self, step: int) -> str:
        """The name of the newest checkpoint of ``step``, which may have zeros in front of the number; that to which it
        would be saved, if there is none.
        """
        named = [path for path in self._paths() if number_of(path, PREFIX) == step]
        newest = next(newest_first(named), None)
        return f"{PREFIX}{step}" if newest is None else newest.path.name

    @staticmethod
    def is_one(path: Location) -> bool:
        """Whether a path is named as a checkpoint of a step is."""
        return number_of(path, PREFIX) >= 0

    def committed(self) -> list[int]:
        """The steps with a checkpoint, in order."""
        return sorted({number_of(path, PREFIX) for path in self._paths()})

    def latest(self) -> int | None:
        """The step of the newest checkpoint of this package; None if there is none."""
        newest = self.newest_found()
        return None if newest is None else number_of(newest.path, PREFIX)

    def newest_found(self) -> Found | None:
        """The newest checkpoint of this package, whether it can be restored or not; None if there is none."""
        return next(newest_first(self._paths()), None)

    def best(self, keep: Keep) -> int | None:
        """The step of the best checkpoint by ``keep``; None if it does not rank them, or none has the metric."""
        best = keep.the_best(
            newest_first(self._paths()), lambda found: flaw([found], self._verify) is None
        )
        return number_of(best[0].path, PREFIX) if best else None

    def delete_old(
        self, tier: int, keep: Keep, own: set[str], held: Callable[[str], bool] | None = None
    ) -> None:
        """Delete the checkpoints of a tier, among those of the names ``own``, that ``keep`` does not ask for, and that
        are not ``held``; their names leave ``own``.
        """

        def may_go(path: Location) -> bool:
            return path.name in own and not (held is not None and held(path.name))

        retained = retain_here(self.roots[tier], keep=keep, verify=self._verify, among=may_go)
        for path in retained.deleted:
            own.discard(path.name)
            logger.info("deleted checkpoint %s", path)

    def _paths(self) -> list[Location]:
        # Only these are judged: a directory that this user may not read is no matter of a run's.
        return [path for root in self.roots for path in checkpoints(root, self.is_one)]

    def newest(self, leave_out: Collection[str]) -> str | None:
        """The name of the newest checkpoint that can be restored: each file from some tier. None if there are no
        checkpoints.

        Raises :class:`CheckpointCorruptError` if there are some, and all are damaged; :class:`ForeignCheckpointError`
        if all are other programs'; :class:`StorageError` if one that may be the newest cannot be judged.
        """
        for place in newest_whole(self.roots, self._verify, self.is_one, leave_out):
            return place.name
        if paths := self._paths():
            raise ForeignCheckpointError(
                f"{paths[-1]} is a checkpoint of another program; dcp_datastates.convert makes it one of this "
                f"package; or begin in another directory"
            )
        return None
