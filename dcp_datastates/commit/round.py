"""One save on its way to being committed: what one rank brings to the vote, and what came of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_datastates.errors import SaveFailedError
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim

__all__ = ["Document", "FailedPart", "Part", "Round"]


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


Document = Callable[[StorageMeta, Claim], bytes]
"""Makes the bytes of ``.metadata``: once, in the commit thread."""


def _pending() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False)
class Round:
    """One save, from the moment that a rank has its share of the plan until its outcome is known."""

    number: int
    """The same on every rank; the coordinator counts."""
    attempt: Attempt | None
    """The same on every rank; None where this rank knows only that there was a save."""
    directory: Path | None
    """The checkpoint's, with no symbolic links on this rank."""
    part: Part
    """This rank's files."""
    _: KW_ONLY
    timeout: float
    """Seconds without progress after which a rank is given up."""
    path: Path | None = None
    """As the user names the directory."""
    claim: Claim | None = None
    """Coordinator: how the attempt was claimed."""
    overwrite: bool = True
    """Whether a checkpoint may be replaced."""
    first: int = 0
    """Number of the commit group's first round."""
    missed: int = 0
    """Calls of ``dcp.async_save`` here that failed before they came to a writer."""
    committed: Future[None] = field(init=False, default_factory=_pending)
    """Resolves, in the commit thread, with the round's outcome on this rank."""
    _document: Future[Document] = field(init=False, default_factory=_pending)

    def provide(self, document: Document) -> None:
        """Coordinator: DCP has gathered every rank's results. Any thread.

        The first of this and :meth:`abandon` counts.
        """
        with contextlib.suppress(InvalidStateError):
            self._document.set_result(document)

    def abandon(self, error: BaseException) -> None:
        """Coordinator: DCP ended without gathering them."""
        with contextlib.suppress(InvalidStateError):
            self._document.set_exception(error)

    def await_document(self, seconds: float) -> bool:
        """Whether either has come within ``seconds``."""
        return bool(wait([self._document], seconds).done)

    def document(self) -> Document:
        """What :meth:`provide` was given. Raises what :meth:`abandon` was told."""
        return self._document.result()

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
