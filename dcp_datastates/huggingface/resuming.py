"""Which checkpoint of an output directory a Trainer goes on from."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Final, TypeAlias

from transformers.trainer import TRAINER_STATE_NAME

from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.checkpoints.listing import checkpoints, directories
from dcp_datastates.errors import CheckpointCorruptError, CheckpointNotFoundError
from dcp_datastates.manager.frameworks import is_ours, is_ours_here
from dcp_datastates.manager.step_directories import newest_numbered, number_of
from dcp_datastates.storage import presence
from dcp_datastates.storage.object_path import Location, locate

logger = logging.getLogger(__name__)

PREFIX: Final = "checkpoint-"
Resume: TypeAlias = str | Location | bool | None
"""What ``resume_from_checkpoint`` may be; also what :func:`~dcp_datastates.latest` returns."""


class Resumption:
    """The checkpoints from which a training may go on, one after another: if one is damaged, the next older one.

    All ranks make the same calls.

    Args:
        given: the argument of ``train``: True for the newest checkpoint in ``output_dir``, or a path.
        output_dir: of the Trainer.
    """

    def __init__(self, given: str | Location | bool, output_dir: str) -> None:
        self._given = None if isinstance(given, bool) else str(given)
        named = self._given is not None
        self._folder = Path(str(given)).absolute().parent if named else Path(output_dir)
        self._left_out: dict[str, Exception] = {}

    def next(self) -> tuple[str, bool]:
        """The path of the checkpoint, and whether it is one of this package.

        A path with the highest number in its folder means the newest checkpoint, since programs choose it so: if no
        whole checkpoint is there, the newest one in the folder takes its place.

        Raises ValueError, as the Trainer does, if there is none in ``output_dir``; :class:`CheckpointNotFoundError` for
        another path to a checkpoint that was not committed, :class:`CheckpointCorruptError` for one that is damaged.
        """
        if self._given is None:
            newest = self._newest()
            if newest is None:
                raise ValueError(
                    f"No valid checkpoint found in output directory ({self._folder}): a first run starts with "
                    f"trainer.train(). This line starts or resumes: "
                    f"trainer.train(resume_from_checkpoint=dcp_datastates.latest(args.output_dir))"
                )
            return newest, is_ours(newest)
        problem = self._left_out.get(Path(self._given).name) or _problem(self._given)
        if problem is None:
            return self._given, is_ours(self._given)
        newest = None
        if _is_highest(self._given):
            self._left_out.setdefault(Path(self._given).name, problem)
            with contextlib.suppress(CheckpointCorruptError):  # the problem tells more
                newest = self._newest()
        if newest is None:
            raise problem
        logger.warning(
            "resume_from_checkpoint=%r cannot be loaded (%s); going on from %s, the newest checkpoint beside it",
            self._given,
            problem,
            newest,
        )
        return newest, is_ours(newest)

    def leave_out(self, path: str, error: Exception) -> None:
        """The checkpoint at ``path`` cannot be loaded. Raises ``error`` if there is no other one to try."""
        if self._given is not None and not _is_highest(self._given):
            raise error
        logger.error("leaving out checkpoint %s: %s", path, error)
        self._left_out[Path(path).name] = error

    def _newest(self) -> str | None:
        newest = newest_numbered(self._folder, PREFIX, is_stock, leave_out=self._left_out)
        return None if newest is None else str(newest)


def _problem(path: str) -> Exception | None:
    """Why the checkpoint that was named cannot be loaded, as far as one knows without reading it."""
    try:
        ours = is_ours(path)
    except (CheckpointNotFoundError, CheckpointCorruptError) as error:
        return error
    if ours or from_first_rank(lambda: is_stock(locate(path)), "is_stock", "who saved"):
        return None
    return ValueError(f"Can't find a valid checkpoint at {path}")  # as the Trainer says


def _is_highest(given: str) -> bool:
    """Whether a path has the highest number in its folder. All ranks call this."""
    path = locate(given)
    if not isinstance(path, Path):
        return False
    path = path.absolute()

    def look() -> bool:
        numbers = [number_of(each, PREFIX) for each in directories(path.parent)]
        return 0 <= number_of(path, PREFIX) == max(numbers, default=-1)

    return from_first_rank(look, "highest", "the newest checkpoint")


def former_run(run: Path, saved: Collection[str]) -> list[Location]:
    """The checkpoints in a directory, also the Trainer's own, in order, but for those of the names ``saved``."""
    committed = set(checkpoints(run))
    return [
        path
        for path in directories(run)
        if number_of(path, PREFIX) >= 0 and path.name not in saved
        if path in committed or is_stock(path)
    ]


def is_stock(path: Location) -> bool:
    """Whether a checkpoint that the Trainer itself has saved is at ``path``."""
    return isinstance(path, Path) and presence.is_file(path / TRAINER_STATE_NAME)


def is_lost(path: str | Path) -> bool:
    """Whether a save of this package to ``path`` was not committed."""
    try:
        is_ours_here(path)
    except CheckpointNotFoundError:
        return True
    return False
