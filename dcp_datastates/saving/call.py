"""What is known of a save when it is called for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.config import WriterConfig
from dcp_datastates.storage import local

__all__ = ["DROPPED", "LEFT_OUT", "SKIPPED", "SaveCall", "Way"]

SKIPPED: Final = 1
DROPPED: Final = 2
LEFT_OUT: Final = {
    SKIPPED: "earlier saves are late: all ranks skip this one (skip)",
    DROPPED: "a newer save came before this one had begun: all ranks drop it (newest)",
}
"""Why a save is left out."""


class Way(Enum):
    """Who runs a save."""

    PACKAGE = "dcp_datastates.async_save"
    """This package's planning thread."""
    DCP_ASYNC = "dcp.async_save"
    """A thread of DCP's."""
    DCP = "dcp.save"
    """DCP, in the thread of the call."""


@dataclass(frozen=True, eq=False)
class SaveCall:
    """One call, as it was made."""

    group: CommitGroup
    """The ranks that the writer commits with."""
    config: WriterConfig
    way: Way
    path: Path | None
    """The checkpoint's directory; None until DCP names it."""
    order: int
    """Sequence number in this process."""
    missed: int = 0
    """Calls of ``dcp.async_save`` here that failed before, unseen by the other ranks."""
    working_directory: str | None = field(default_factory=local.working_directory)
    """Of the process at the call."""
    began: float = field(default_factory=time.monotonic)
    """Seconds, on the clock of :func:`time.monotonic`."""

    @property
    def asynchronous(self) -> bool:
        """Whether training goes on meanwhile."""
        return self.way is not Way.DCP

    @property
    def own(self) -> bool:
        """Whether this package runs it, and not DCP."""
        return self.way is Way.PACKAGE

    @property
    def background(self) -> bool:
        """Whether what runs it may go on before the commit."""
        return self.own or (self.asynchronous and self.config.commit == "background")
