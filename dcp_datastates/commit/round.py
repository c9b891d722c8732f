"""One save on its way to being committed: what one rank brings to the vote, and what came of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_datastates.errors import SaveFailedError
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim

__all__ = ["FailedPart", "Part", "Round"]


class Part(Protocol):
    """One rank's files of one save, on their way to stable storage."""

    def wait(self, seconds: float) -> bool:
        """Whether they are durable, or have failed and nothing touches them any more, within ``seconds``."""

    @property
    def error(self) -> BaseException | None:
        """Why they failed; None while under way, and once durable."""

    @property
    def progress(self) -> int:
        """A number that changes as long as there is progress."""

    def cancel(self) -> None:
        """Fail them if they are not durable. Returns at once."""


@dataclass(frozen=True)
class FailedPart:
    """A part that never came to be, or was removed again."""

    error: BaseException
    progress: int = 0

    def wait(self, seconds: float) -> bool:
        return True

    def cancel(self) -> None:
        pass


@dataclass(frozen=True)
class Consolidated:
    """What the coordinator publishes. ``document`` makes the bytes of ``.metadata``, once, in the commit thread."""

    document: Callable[[StorageMeta, Claim], bytes]


class Round:
    """One save, from the moment that a rank has its share of the plan until its outcome is known.

    Args:
        number: the same on every rank; the coordinator counts.
        attempt: the same on every rank; None where this rank knows only that there was a save.
        directory: the checkpoint's, with no symbolic links on this rank.
        part: this rank's files.
        path: as the user names the directory.
        claim: coordinator: how the attempt was claimed.
        overwrite: whether a checkpoint may be replaced.
        first: number of the commit group's first round.
        timeout: seconds without progress after which a rank is given up.
        missed: calls of ``dcp.async_save`` here that failed before they came to a writer.

    ``committed`` resolves, in the commit thread, with the round's outcome on this rank.
    """

    def __init__(
        self,
        number: int,
        attempt: Attempt | None,
        directory: Path | None,
        part: Part,
        *,
        path: Path | None = None,
        claim: Claim | None = None,
        overwrite: bool = True,
        first: int = 0,
        timeout: float,
        missed: int = 0,
    ) -> None:
        self.number: Final = number
        self.attempt: Final = attempt
        self.directory: Final = directory
        self.path: Final = path or directory
        self.part: Final = part
        self.claim: Final = claim
        self.overwrite: Final = overwrite
        self.first: Final = first
        self.timeout: Final = timeout
        self.missed: Final = missed
        self.committed: Future[None] = Future()
        self.committed.set_running_or_notify_cancel()
        self.consolidated: Consolidated | None = None
        self.abandoned: BaseException | None = None
        self.older: list[Attempt] = []  # what may go if it commits; the commit thread's
        self.failure: BaseException | None = None  # of the publication; the commit thread's
        self._settled = threading.Event()  # set once either of the two above is

    def provide(self, consolidated: Consolidated) -> None:
        """Coordinator: DCP has gathered every rank's results. Any thread, once."""
        self.consolidated = consolidated
        self._settled.set()

    def abandon(self, error: BaseException) -> None:
        """Coordinator: DCP ended without gathering them. Changes nothing after :meth:`provide`."""
        if not self._settled.is_set():
            self.abandoned = error
            self._settled.set()

    def await_consolidated(self, seconds: float) -> bool:
        """Whether either has come within ``seconds``."""
        return self._settled.wait(seconds)

    def resolve(self, error: BaseException | None) -> None:
        """Let ``committed`` know. The first call counts."""
        if self.claim is not None:
            self.claim.hold.release()
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.committed.set_result(None)
            else:
                self.committed.set_exception(error)

    @staticmethod
    def missing(number: int, first: int, timeout: float) -> Round:
        """A round of which this rank has heard nothing: it votes against it."""
        error = SaveFailedError("this rank has no such save: its part of DCP's planning failed")
        return Round(number, None, None, FailedPart(error), first=first, timeout=timeout)
