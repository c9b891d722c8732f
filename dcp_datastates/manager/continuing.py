"""Whether a loop goes on from what its root holds: decided once, at its first save or restore, alike on all ranks.

The first rank looks, once. Then the loop goes on from a checkpoint, or starts from scratch and says so in a line, or is
refused: nothing of a former run is replaced or deleted because a loop did not restore it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

from dcp_datastates.checkpoints.copy import copy
from dcp_datastates.checkpoints.delete import delete
from dcp_datastates.checkpoints.first_rank import DEFAULT_TIMEOUT, from_first_of
from dcp_datastates.checkpoints.listing import candidates, checkpoints, directories, newest_first
from dcp_datastates.checkpoints.pins import pin, pins, unpin
from dcp_datastates.commit.group import commit_group
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    IncompatibleStateError,
    UnsafeObjectError,
)
from dcp_datastates.loading.fit import Fit, LoadOptions
from dcp_datastates.loading.session import load_session
from dcp_datastates.manager.step_directories import PREFIX, StepDirectories, number_of
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.storage import local, operations
from dcp_datastates.storage.object_path import Location
from dcp_datastates.text import duration
from dcp_datastates.training.training_state import TrainingState

logger = logging.getLogger(__name__)

Fresh = Literal["refuse", "replace"]

T = TypeVar("T")

_PHASE: Final = "set aside"
_PATIENCE_SECONDS: Final = 86400.0
"""How long the other ranks wait at their first save for the first one: it may evaluate before, or copy within a store.
"""

_NAMED: Final = 5
"""How many names a message has."""


def parse_fresh(fresh: Any) -> Fresh:
    """``fresh``, if it is one of them. Raises :class:`ConfigurationError`."""
    if fresh not in get_args(Fresh):
        raise ConfigurationError(f'fresh={fresh!r} must be "refuse" or "replace"')
    return fresh  # type: ignore[no-any-return]


class Continuing:
    """What one loop goes on from. The thread of the loop calls the methods; all ranks call them alike.

    Args:
        steps: the checkpoints.
        ranks: the ranks as they are now. Those at the construction are the loop's.
        timeout: seconds for which a restore waits for a rank that makes no progress.
        fresh: whether a loop that restores nothing may begin in a root with checkpoints: ``"refuse"``, or
            ``"replace"``: those are set aside.
        options: of each restore, where a call has no others.
        adopt: is told, on the first rank, the names of the checkpoints that are the loop's own to delete from now on.

    Raises :class:`ConfigurationError` for an option that cannot work.
    """

    def __init__(
        self,
        steps: StepDirectories,
        ranks: Callable[[], RankSet],
        timeout: float,
        fresh: Fresh,
        options: LoadOptions,
        adopt: Callable[[Iterable[str]], None],
    ) -> None:
        parse_fresh(fresh)
        Fit.of_restore(options)
        self._steps = steps
        self._ranks = ranks
        self._rank_set = ranks()
        self._timeout = timeout
        self._options = options
        self._replaces = fresh == "replace"
        self._adopt = adopt
        self._decided = False
        self._half_restored: Location | None = None
        """What a restore was to load that ended with an error, maybe on this rank alone."""
        self._first: int | None = None
        self._there: list[str] = []
        """On the first rank: what the root held at the latest look for a restore."""

    def check_ranks(self) -> None:
        """Refuse to work with other ranks than those of the construction: they would save beside each other."""
        now = self._ranks().ranks
        if now != self._rank_set.ranks:
            raise ConfigurationError(
                f"the manager was made for {len(self._rank_set.ranks)} ranks, and the process group has {len(now)}; "
                f"make it after init_process_group, and close it before destroy_process_group"
            )

    def called(self, step: int) -> None:
        """The loop has come to ``step``."""
        if self._first is None:
            self._first = step

    def restore_latest(
        self,
        state: Mapping[str, Any],
        options: LoadOptions,
        timeout: float,
        before_newest: bool = False,
    ) -> int | None:
        """Restore the newest checkpoint that can be loaded, or the one ``before_newest``; return its step, or None: the
        loop starts from scratch.

        Raises as :meth:`StepDirectories.newest` and :meth:`restore`; and :class:`ConfigurationError` if there are only
        checkpoints whose names are of no step.
        """
        chosen, damaged = self._chosen(options), list[str]()

        def look() -> str | None:
            self._there = self._names()
            name = self._steps.newest(damaged)
            if before_newest and name is not None and not damaged:
                if len(self._steps.committed()) < 2:
                    raise ConfigurationError(
                        f"an audit resumes from the checkpoint before the newest, and {name} is the only one: keep=2"
                    )
                damaged.append(name)
                name = self._steps.newest(damaged)
            if name is None:
                self._check_others()
                logger.info("starting from scratch: %s", self._describe())
            return name

        while (newest := self._ask(look, "newest", "the step to go on from", timeout)) is not None:
            try:
                return self._restore(newest, state, chosen, "restore_latest()")
            except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                logger.error("leaving out checkpoint %s: %s", self._steps.roots[0] / newest, error)
                damaged.append(newest)
        self._decided = True
        return None

    def restore(self, step: int, state: Mapping[str, Any], options: LoadOptions) -> int:
        """Restore the checkpoint of ``step``; return ``step``. Raises as :func:`load`."""
        chosen = self._chosen(options)

        def look() -> str:
            self._there = self._names()
            return self._steps.name_of(step)

        name = self._ask(look, "named", f"where step {step} is")
        return self._restore(name, state, chosen, "restore()")

    def _chosen(self, options: LoadOptions) -> LoadOptions:
        chosen: LoadOptions = {**self._options, **options}
        Fit.of_restore(chosen)  # raises on each rank, before the first one looks
        return chosen

    def _restore(self, name: str, state: Mapping[str, Any], options: LoadOptions, verb: str) -> int:
        fit = Fit.of_restore(options)
        places = self._steps.places(name)
        parts = TrainingState(state, self._rank_set)
        try:
            with load_session(self._rank_set, places, verb, self._timeout) as session:
                parts.load(session, fit, share_reads=options.get("share_reads"))
        except (IncompatibleStateError, UnsafeObjectError):
            raise  # nothing was changed
        except BaseException:
            self._half_restored = places[0]
            raise
        self._half_restored = None
        self._decided = True
        self._adopt(self._there)  # what lies beside it is of this run, too
        return number_of(places[0], PREFIX)

    def before_save(self) -> None:
        """A save is about to begin. Raises :class:`ConfigurationError` if the loop would begin another run among the
        checkpoints of a former one, or if its state is half restored.
        """
        self.check_ranks()
        if self._half_restored is not None:
            raise ConfigurationError(
                f"the restore of {self._half_restored} has failed half way, so that the state may be a mixture, which "
                f"is not saved. Restore again; or make the state anew, and another CheckpointManager"
            )
        if self._decided:
            return
        assert self._first is not None
        begin = partial(self._begin, self._first)
        self._ask(begin, "root", "what the root holds", _PATIENCE_SECONDS)
        self._decided = True

    # ---- the first rank ------------------------------------------------------------------------------

    def _begin(self, first: int) -> None:
        steps = self._steps.committed()
        if not steps:
            logger.info("starting from scratch: %s", self._describe())
        elif self._replaces:
            for root in self._steps.roots:
                set_aside(root, checkpoints(root, self._steps.is_one))
        elif first <= steps[-1]:
            raise ConfigurationError(
                f"{self._describe()}, and this loop, which has restored nothing, begins at step {first}: its "
                f"checkpoints would replace those of a former run. Continuing needs restore_latest() before the first "
                f'save; another run needs another root, or CheckpointManager(fresh="replace"), which sets those aside'
            )
        else:
            text = "going on at step %d without a restore: %s"
            logger.log(once_per_job(logging.INFO), text, first, self._describe())
            self._adopt(self._names())

    def _check_others(self) -> None:
        others = self._others()
        if others and not self._replaces:
            named = ", ".join(others[:_NAMED]) + (", …" if len(others) > _NAMED else "")
            raise ConfigurationError(
                f"{str(self._steps.roots[0])!r} has no checkpoint of a step ({PREFIX}N), but committed ones of other "
                f"names: {named}. To go on from one, rename it to {PREFIX}N, with its step, or load() it; to start "
                f'from scratch beside them, pass CheckpointManager(fresh="replace"): they stay as they are'
            )

    def _others(self) -> list[str]:
        others = []
        for root in self._steps.roots:
            for found in newest_first(filterfalse(self._steps.is_one, candidates(root))):
                if found.error is None:
                    others.append(found.path.name)
                else:
                    logger.warning("no checkpoint of a step, and left alone: %s", found.error)
        return others

    def _describe(self) -> str:
        root = repr(str(self._steps.roots[0]))
        steps = self._steps.committed()
        if not steps:
            others = self._others()
            held = f"has only {', '.join(others[:_NAMED])}" if others else "is empty"
            return f"{root} {held}"
        newest = self._steps.newest_found()
        if newest is None or newest.committed is None:
            return f"{root} has {PREFIX}{steps[-1]}"
        age = duration(max(0.0, time.time() - newest.committed.committed_at))
        name = newest.path.name
        further = "" if number_of(newest.path, PREFIX) == steps[-1] else f" and {PREFIX}{steps[-1]}"
        return f"{root} has {name} ({age} old){further}"

    def _names(self) -> list[str]:
        """The names of all directories of steps: also of saves and deletions that were cut off."""
        return [
            path.name
            for root in self._steps.roots
            for path in directories(root)
            if self._steps.is_one(path)
        ]

    def _ask(
        self, compute: Callable[[], T], key: str, purpose: str, timeout: float = DEFAULT_TIMEOUT
    ) -> T:
        detector = commit_group(self._rank_set).detector
        return from_first_of(self._rank_set, compute, key, purpose, timeout, detector)


def set_aside(root: Location, paths: list[Location]) -> None:
    """Move the checkpoints at ``paths`` into a directory of their own in ``root``, where no rule deletes them.

    A directory is renamed. A store renames nothing: there, each is copied, and then deleted.
    """
    if not paths:
        return
    aside = root / f"set-aside-{datetime.now(timezone.utc):%Y-%m-%dT%H-%M-%S-%f}"
    logger.warning(
        "starting from scratch: the checkpoints of a former run in %s, %s to %s, are set aside in %s",
        root,
        paths[0].name,
        paths[-1].name,
        aside.name,
    )
    for path in paths:
        if isinstance(path, Path):
            with local.explained("setting the checkpoint aside", path):
                local.make_directories(Path(str(aside)), _PHASE)
                operations.rename(path, Path(str(aside / path.name)), _PHASE)
                operations.sync_directory(Path(str(aside)), _PHASE)
                operations.sync_directory(path.parent, _PHASE)
            continue
        kept: Any = copy(path, aside / path.name)
        for name in pins(path):
            pin(kept, name)
            unpin(path, name)
        delete(path)
