"""What the engine is given to write for one save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_datastates._native import DeviceEvent, SaveFile
from dcp_datastates.format.layout import FileLayout, SealedFile
from dcp_datastates.planning.exchange import Report

__all__ = ["WriteJob"]


@dataclass(frozen=True, eq=False)
class WriteJob:
    """What the engine is given to write: the files of this rank's part, with their layouts."""

    files: list[SaveFile]
    sealed: Sequence[SealedFile]
    layouts: Sequence[FileLayout]
    fences: list[DeviceEvent]
    """Events that device copies must wait for."""
    keep: list[Any]
    """Objects that must stay alive until they have been read."""
    report: Report | None = None
    """Known if the files were prepared."""
    readers: list[DeviceEvent] = field(default_factory=list)
    """Events of the kernels that this thread has launched to resolve tensors."""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.sealed)
