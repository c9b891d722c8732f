"""The facts about a save that are fixed when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.config import WriterConfig
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location

LEFT_OUT: Final = "earlier saves are late: all ranks skip this one (skip)"
"""Why a save is left out."""


class SaveOrigin(Enum):
    """Which API and which thread run a save."""

    PACKAGE = "dcp_datastates.async_save"
    """This package's planning thread."""
    DCP_ASYNC = "dcp.async_save"
    """DCP, in a thread that it starts."""
    DCP = "dcp.save"
    """DCP, in the thread of the call."""


@dataclass(frozen=True, eq=False)
class SaveCall:
    """One call of a save function."""

    group: CommitGroup
    """The ranks that the writer commits with."""
    config: WriterConfig
    origin: SaveOrigin
    path: Location | None
    """The checkpoint's directory; None until DCP names it."""
    order: int
    """Sequence number in this process."""
    number: int
    """Of this save, among the saves of these ranks in this process that this package runs, or (``own`` is false)
    DCP.
    """
    unused_writers: int = 0
    """For a save that DCP runs: how many writers the program had made and not used."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The numbers by which the user compares checkpoints."""
    working_directory: str | None = field(default_factory=local.working_directory)
    """The process's working directory at the call."""

    @property
    def asynchronous(self) -> bool:
        """Whether the call returns before the save is committed."""
        return self.origin is not SaveOrigin.DCP

    @property
    def own(self) -> bool:
        """Whether this package runs the save, rather than DCP."""
        return self.origin is SaveOrigin.PACKAGE
