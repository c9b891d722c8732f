"""The commit in an object store (docs/commit.md, "In an object store"; the numbers are its steps).

A store has no directories, no rename and no locks. An attempt is committed by the creation of one object, its decision
(``storage/decisions.py``), and the checkpoint at a path is the newest attempt that is committed there
(``storage/store_attempts.py``).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_datastates.commit.round import Document, Round
from dcp_datastates.errors import (
    CheckpointSupersededError,
    CommitOutcomeUnknown,
    StorageError,
)
from dcp_datastates.process.forks import ProcessLock, after_fork
from dcp_datastates.storage import decisions, store_attempts, store_claims, store_index
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.bounded import step
from dcp_datastates.storage.claims import Claim, Neighbours
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.local import METADATA_NAME
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.storage.self_test import Operation, creates_once, what_works
from dcp_datastates.storage.store_claims import StoreClaim

__all__ = ["StorePlace"]

logger = logging.getLogger(__name__)

_REMEMBERED: Final = 64

_lock = ProcessLock()  # guards _committed
_committed: OrderedDict[ObjectPath, Attempt] = OrderedDict()
"""By path: what this process has committed there last."""


class StorePlace:
    """A checkpoint's prefix in an object store (a ``places.Place``)."""

    def __init__(self, directory: ObjectPath) -> None:
        self._directory: Final = directory

    @property
    def _creates_once(self) -> bool:
        return creates_once(self._directory.parent)

    @property
    def _deletes(self) -> bool:
        """Whether the credentials may delete there. If not, that was said once, and nothing is removed."""
        return what_works(self._directory.parent).works(Operation.DELETE)

    def check_overwrite(self, overwrite: bool) -> None:
        if not overwrite:
            store_claims.check_absent(self._directory)

    def claim(self, neighbours: Neighbours, overwrite: bool) -> Claim:
        what_works(
            self._directory.parent
        )  # the first save tries it now, where nothing waits for it
        return store_claims.claim(self._directory, neighbours, overwrite)

    # ---- publishing ------------------------------------------------------------------------------

    def publish(
        self, round_: Round, document: Document, waiting: Callable[[], None] = lambda: None
    ) -> None:
        directory, attempt, claim = self._directory, round_.attempt, round_.claim
        assert attempt is not None
        assert isinstance(claim, StoreClaim)
        data = document(StorageMeta(checkpoint_id=str(round_.path), save_id=attempt.name), claim)
        if not (claim.alone and round_.overwrite):
            self._withdraw_older(attempt, round_.overwrite)
        if round_.archives:
            path = directory / attempt.archive_pin
            path.store.put(path.key, b"")
        store_index.register(directory, attempt)  # 5
        self._decide(attempt, data)
        round_.published = data
        with _lock:
            _committed[directory] = attempt
            _committed.move_to_end(directory)
            while len(_committed) > _REMEMBERED:
                _committed.popitem(last=False)

    def _withdraw_older(self, attempt: Attempt, overwrite: bool) -> None:  # 4
        there = store_attempts.survey(self._directory)
        for other, contents in sorted(there.items()):
            if other > attempt and contents.is_committed:
                raise CheckpointSupersededError(
                    f"a newer save, attempt {other.name}, was committed to {str(self._directory)!r} before attempt "
                    f"{attempt.name}; it stands. Were two jobs started on one path?"
                )
            if other < attempt and contents.decision is None and self._creates_once:
                decisions.withdraw(self._directory, other)
        self.check_overwrite(overwrite)  # one of them may have been committed just now

    def _decide(self, attempt: Attempt, data: bytes) -> None:  # 6, 7
        directory = self._directory
        try:
            if not self._creates_once:
                state = decisions.decide_unguarded(directory, attempt, data)
            else:
                state = decisions.decide(directory, attempt, data)
        except StorageError as error:
            raise CommitOutcomeUnknown(
                f"attempt {attempt.name} at {str(directory)!r} may be committed, or may yet come to be: the store "
                f"fails ({error.strerror})"
            ) from error
        if state is State.WITHDRAWN:
            if not store_attempts.has_data(directory, attempt):
                raise CommitOutcomeUnknown(
                    f"attempt {attempt.name} at {str(directory)!r} may have been committed, and deleted since"
                )
            raise CheckpointSupersededError(
                f"attempt {attempt.name} at {str(directory)!r} was withdrawn: the store did not confirm it in time, "
                f"the other ranks have given this save up, or another job saves to the same path"
            )

    # ---- settling ----------------------------------------------------------------------------------

    def settle(self, attempt: Attempt) -> bool | None:  # 8
        if not self._creates_once:
            if decisions.state_of(self._directory, attempt) is State.COMMITTED:
                return True
            return None
        match decisions.withdraw(self._directory, attempt):
            case State.COMMITTED:
                return True
            case State.DELETED:
                return None
            case State.WITHDRAWN:
                # A deletion removes the decision after all data. Without data, another withdrawal may have come
                # after it.
                return False if store_attempts.has_data(self._directory, attempt) else None

    # ---- cleaning up -------------------------------------------------------------------------------

    def find_older(self, round_: Round) -> list[Attempt]:
        # One request deletes a thousand objects, so the coordinator does it for all ranks: they need not list the path.
        return list(round_.claim.older) if isinstance(round_.claim, StoreClaim) else []

    def tidy_after_commit(
        self, round_: Round, superseded: Sequence[Attempt], rank: int, world: int
    ) -> None:
        try:
            if rank == 0 and round_.attempt is not None:
                self._copy(round_.attempt, round_.published)
            if superseded and self._deletes:
                self.remove(superseded)
        except StorageError as error:
            logger.warning("after the commit to %s, tidying up failed: %s", self._directory, error)

    def _copy(self, attempt: Attempt, data: bytes | None) -> None:  # 9
        """Write ``.metadata``, so that a copy of the prefix in a file system can be loaded. No loader from the store
        trusts it: another process may write an older one later.
        """
        if data is None:  # the publication was settled
            decision = decisions.read(self._directory, attempt)
            if decision is None or decision.state is not State.COMMITTED:
                return
            data = decision.data
        path = self._directory / METADATA_NAME
        step()
        path.store.put(path.key, data)

    def remove(self, superseded: Iterable[Attempt]) -> None:  # 10
        """Remove attempts that a newer one has replaced. Raises :class:`StorageError`.

        Each step leaves every committed attempt whole. A withdrawal stays for good: it keeps the attempt from being
        committed by a process that wakes late.
        """
        directory = self._directory
        there = store_attempts.survey(directory)
        found = {attempt: there[attempt] for attempt in superseded if attempt in there}
        replaced = [attempt for attempt, contents in found.items() if contents.is_committed]
        for attempt in replaced:
            decisions.mark_deleted(directory, attempt)
        data = [each for contents in found.values() for each in contents.data]
        store_attempts.delete_objects(directory, data)
        store_index.forget(directory, found)
        rest = [
            each
            for attempt in replaced
            for each in (found[attempt].decision, *found[attempt].others)
            if each is not None
        ]
        store_attempts.delete_objects(directory, rest)

    def tidy_after_failure(self, round_: Round, rank: int, world: int) -> None:
        if round_.attempt is None:
            return
        try:
            if not self._deletes:
                return
            store_attempts.remove_data(self._directory, round_.attempt, rank, world)
            if round_.archives and rank == 0:
                path = self._directory / round_.attempt.archive_pin
                path.store.delete([path.key])
        except StorageError as error:
            logger.warning("files of a failed save stay at %s: %s", self._directory, error)

    def warn_if_replaced(self) -> None:
        with _lock:
            ours = _committed.get(self._directory)
        if ours is None:
            return
        try:
            found = store_attempts.newest_committed(self._directory)
        except StorageError as error:
            logger.debug("could not look at what is at %s: %s", self._directory, error)
            return
        if found is None or found[0] <= ours:
            return
        with _lock:
            if _committed.get(self._directory) != ours:
                return
            del _committed[self._directory]
        logger.warning(
            "the checkpoint that was committed at %s as attempt %s was replaced by attempt %s of another process; do "
            "two jobs save to one path?",
            self._directory,
            ours.name,
            found[0].name,
        )


@after_fork
def _forget_in_child() -> None:
    _committed.clear()
