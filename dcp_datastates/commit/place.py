"""A save from its vote to the outcome, and the place where it is committed (the steps of docs/design/commit.md).

The place is a directory, or a prefix in an object store. An attempt is committed by the creation of one object, its
decision (``storage/decisions.py``), and the checkpoint at a path is the newest attempt that is committed there
(``storage/attempts.py``). No lock is needed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Final, Protocol

from dcp_datastates.errors import (
    CheckpointSupersededError,
    CommitOutcomeUnknown,
    SaveFailedError,
    StorageError,
)
from dcp_datastates.format.metadata_table import Compose
from dcp_datastates.process.futures import SharedFuture
from dcp_datastates.results import Timeline
from dcp_datastates.storage import (
    attempts,
    claims,
    decisions,
    local_store,
    operations,
)
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.local import METADATA_NAME
from dcp_datastates.storage.object_path import Location, stored
from dcp_datastates.storage.object_store import NotDurableError, NotStoredError
from dcp_datastates.storage.self_test import Operation, what_works_for

logger = logging.getLogger(__name__)


class Part(Protocol):
    """One rank's files of one save, on their way to stable storage."""

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until the files are durable, or have failed and are no longer written; return whether
        they are.
        """

    @property
    def error(self) -> BaseException | None:
        """Why the files failed; None while they are in progress, and once they are durable."""

    @property
    def progress(self) -> int:
        """A number that changes while there is progress."""

    def cancel(self) -> None:
        """Fail the files if they are not durable yet. Returns immediately."""

    def check(self) -> None:
        """Once they are durable: raise :class:`StorageError` unless storage shows each with its size. Asks storage."""


@dataclass(frozen=True)
class EndedPart:
    """A part whose files are durable already, or, because of ``error``, were never written or are removed again."""

    error: BaseException | None = None
    progress: int = 0

    def wait(self, seconds: float) -> bool:
        return True

    def cancel(self) -> None:
        pass

    def check(self) -> None:
        pass


@dataclass(eq=False)
class Round:
    """One save, from the moment that a rank has its part of the plan until its outcome is known."""

    number: int
    """The round's number, which the coordinator draws; the same on every rank."""
    attempt: Attempt | None
    """The attempt, the same on every rank; None if this rank knows only that there was a save."""
    directory: Location | None
    """The checkpoint's directory, with symbolic links resolved on this rank; or its prefix in an object store."""
    part: Part
    """This rank's files."""
    _: KW_ONLY
    timeout: float
    """Seconds without progress after which a rank counts as lost."""
    path: Location | None = None
    """The directory as the user named it."""
    claim: Claim | None = None
    """Coordinator: how the attempt was claimed."""
    overwrite: bool = True
    """Whether this save may replace a checkpoint."""
    report: Callable[[], bytes] = bytes
    """Makes what this rank tells the coordinator with its vote, once its part is durable."""
    compose: Compose | None = None
    """Coordinator: makes the metadata of all ranks' reports."""
    archives: bool = False
    """Whether the checkpoint is to be archived: it is committed with the pin that keeps it until then."""
    timeline: Timeline = field(default_factory=Timeline)
    """When the phases of the save began."""
    trace: Callable[[], bytes] = bytes
    """Makes what this rank tells of the save's cost with its vote."""
    committed: SharedFuture = field(default_factory=SharedFuture)
    """The commit thread settles it with the outcome on this rank. It is the save's, which may have failed before."""
    published: bytes | None = field(init=False, default=None)
    """Coordinator: the metadata that were committed, until the round is over."""
    failure: BaseException | None = field(init=False, default=None)
    """Why the save failed here, if the part does not say so: its publication, or storage that hangs."""

    def __str__(self) -> str:
        return f"save {self.number}"

    @staticmethod
    def missing(number: int, timeout: float) -> Round:
        """A round that this rank knows nothing of: the rank votes no."""
        error = SaveFailedError("this rank has no such save: its part of DCP's planning failed")
        return Round(number, None, None, EndedPart(error), timeout=timeout)


class Place:
    """A checkpoint's path. The rounds are of saves to it. All methods but the last two raise :class:`StorageError` if
    storage fails.
    """

    def __init__(self, location: Location) -> None:
        """Asks no storage."""
        self._directory: Final = stored(location)

    @property
    def _creates_once(self) -> bool:
        return what_works_for(self._directory).works(Operation.CREATE_ONCE)

    @property
    def _deletes(self) -> bool:
        """Whether this process may delete there. If not, that was said once, and nothing is removed. (In a directory,
        each deletion that is refused is said.)
        """
        return self._directory.is_local or what_works_for(self._directory).works(Operation.DELETE)

    # ---- publishing ------------------------------------------------------------------------------

    @operations.during("publish")
    def publish(self, round_: Round, data: bytes) -> None:
        """Coordinator: commit the round's attempt, with the metadata ``data``.

        Raises :class:`CommitOutcomeUnknown`, or another :class:`DataStatesError`: then the attempt is not committed,
        and cannot be any more.
        """
        directory, attempt, claim = self._directory, round_.attempt, round_.claim
        assert attempt is not None
        assert claim is not None
        if not (claim.alone and round_.overwrite):
            self._withdraw_older(attempt, round_.overwrite)
        if round_.archives:
            path = directory / attempt.archive_pin
            path.store.put(path.key, b"")
        attempts.register(directory, attempt)  # 9
        self._decide(attempt, data)
        round_.published = data
        if directory.is_local:
            operations.tell(Path(str(directory)), attempt.name)

    def _withdraw_older(self, attempt: Attempt, overwrite: bool) -> None:  # 8
        for other in attempts.present(self._directory):
            state = None if other == attempt else decisions.state_of(self._directory, other)
            if other > attempt and state is State.COMMITTED:
                raise CheckpointSupersededError(
                    f"a newer save, attempt {other.name}, was committed to {str(self._directory)!r} before attempt "
                    f"{attempt.name}; it stands. Were two jobs started on one path?"
                )
            if other < attempt and state is None and self._creates_once:
                decisions.withdraw(self._directory, other)
        if not overwrite:
            claims.check_absent(self._directory)  # one of them may have been committed just now

    def _decide(self, attempt: Attempt, data: bytes) -> None:  # 10
        directory = self._directory
        doubts: list[OSError] = []
        try:
            if not self._creates_once:
                state = decisions.decide_alone(directory, attempt, data, creates_once=False)
            else:
                state = decisions.decide(directory, attempt, data, doubts.append)
        except NotStoredError as error:
            raise StorageError(error.errno, error.strerror, error.filename) from error
        except NotDurableError as error:
            raise CommitOutcomeUnknown(
                f"the decision to commit attempt {attempt.name} at {str(directory)!r}: {error.strerror}"
            ) from error
        except StorageError as error:
            raise CommitOutcomeUnknown(
                f"attempt {attempt.name} at {str(directory)!r} may be committed, or may yet come to be: storage "
                f"fails ({error.strerror})"
            ) from error
        if state is State.WITHDRAWN:
            # Of a directory, only a failure leaves a doubt: a name that is there is another's.
            may_be_ours = bool(doubts) or not directory.is_local
            if may_be_ours and not attempts.has_data(directory, attempt):
                raise CommitOutcomeUnknown(
                    f"attempt {attempt.name} at {str(directory)!r} may have been committed, and deleted since"
                )
            raise CheckpointSupersededError(
                f"attempt {attempt.name} at {str(directory)!r} was withdrawn: "
                + (
                    f"storage did not confirm it ({doubts[0]})"
                    if doubts
                    else "the other ranks have given this save up, or another job saves to the same path"
                )
            )

    # ---- settling ----------------------------------------------------------------------------------

    @operations.during("settle")
    def settle(self, attempt: Attempt) -> bool | None:  # 16
        """Any rank that has voted: whether the attempt is committed. If not, it can no longer be. None if that can no
        longer be known.
        """
        # A directory is not tried now, when storage may be in trouble: where nothing is created once, this raises.
        if not (self._directory.is_local or self._creates_once):
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
                return False if attempts.has_data(self._directory, attempt) else None

    # ---- cleaning up -------------------------------------------------------------------------------

    def tidy_after_commit(self, round_: Round) -> None:
        """Coordinator: write what other tools read, and remove the attempts that were there before the claim. (One
        request deletes a thousand objects: other ranks need not even list the path.) Never raises.
        """
        try:
            with operations.during("cleanup", self._directory.folder):
                if self._directory.is_local:
                    local_store.sweep(self._directory.key)
                if round_.attempt is not None:
                    self.show(round_.attempt, round_.published)
                if round_.claim is not None and round_.claim.older and self._deletes:  # 5
                    self.remove(round_.claim.older)
        except StorageError as error:
            logger.warning("after the commit to %s, tidying up failed: %s", self._directory, error)

    def show(self, attempt: Attempt, data: bytes | None) -> None:  # 12
        """Write ``.metadata``, by which DCP's tools know a checkpoint. ``data``: the metadata of the committed
        ``attempt``; None: read them. No loader of this package trusts ``.metadata``: another process may write an older
        one later.
        """
        directory = self._directory
        if data is None:  # the publication was settled
            data = decisions.committed_metadata(directory, attempt)
            if data is None:
                return
        path = directory / METADATA_NAME
        if directory.is_local:
            local_store.put_copy(path.key, decisions.decision_path(directory, attempt).key, data)
        else:
            path.store.put(path.key, data)

    def remove(self, superseded: Iterable[Attempt]) -> None:  # 12
        """Remove attempts that a newer one has replaced. Raises :class:`StorageError`."""
        there = attempts.survey(self._directory, superseded)
        states = {each: State.COMMITTED if there[each].is_committed else None for each in there}
        attempts.remove(self._directory, there, states)

    def tidy_after_failure(self, round_: Round, rank: int, world: int) -> None:
        """Remove ``rank``'s files of the round's own attempt. Never raises."""
        if round_.attempt is None:
            return
        try:
            if not self._deletes:
                return
            with operations.during("cleanup", self._directory.folder):
                attempts.remove_data(self._directory, round_.attempt, rank, world)
            if round_.archives and rank == 0:
                path = self._directory / round_.attempt.archive_pin
                path.store.delete([path.key])
        except StorageError as error:
            if error.errno != errno.ENOENT:  # then nothing is there
                logger.warning("files of a failed save stay at %s: %s", self._directory, error)
