"""A round: one save from one rank's point of view, from its vote to the outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from dcp_datastates.errors import SaveFailedError
from dcp_datastates.format.metadata_table import Compose
from dcp_datastates.process.futures import SharedFuture
from dcp_datastates.stats import Timeline
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim
from dcp_datastates.storage.object_path import Location


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
        """Fail the files if they are not durable yet. Returns at once."""

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
    first: int = 0
    """The number of the commit group's first round."""
    report: bytes = b""
    """What this rank tells the coordinator with its vote."""
    compose: Compose | None = None
    """Coordinator: makes the document of all ranks' reports."""
    archives: bool = False
    """Whether the checkpoint is to be archived: it is committed with the pin that keeps it until then."""
    timeline: Timeline = field(default_factory=Timeline)
    """When the phases of the save began."""
    trace: Callable[[], bytes] = bytes
    """Makes what this rank tells of the save's cost with its vote."""
    published: bytes | None = field(init=False, default=None)
    """Coordinator: the metadata that were committed, until the round is over."""
    failure: BaseException | None = field(init=False, default=None)
    """Why the save failed here, if the part does not say so: its publication, or storage that hangs."""
    committed: SharedFuture = field(init=False, default_factory=SharedFuture)
    """The commit thread resolves it with the round's outcome on this rank."""

    def __str__(self) -> str:
        return f"save {self.number - self.first}"

    def resolve(self, error: BaseException | None) -> None:
        """Resolve ``committed`` with the outcome. The first call counts. Does not wait for storage."""
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.committed.set_result(None)
            else:
                self.committed.set_exception(error)
        self.trace = bytes  # it refers to the save, and the save to this

    @staticmethod
    def missing(number: int, first: int, timeout: float) -> Round:
        """A round that this rank knows nothing of: the rank votes no."""
        error = SaveFailedError("this rank has no such save: its part of DCP's planning failed")
        return Round(number, None, None, EndedPart(error), first=first, timeout=timeout)
