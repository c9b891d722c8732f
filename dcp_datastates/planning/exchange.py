"""What travels between a rank's planner and the coordinator's, inside the plans that DCP gathers and scatters.

A rank offers its local plan: by its digest alone, if the coordinator has it. The coordinator answers with the rank's
share: by its digest alone, if the rank has that. So a save that is like an earlier one sends some bytes each way.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NoReturn

from dcp_datastates.errors import ConfigurationError

__all__ = ["Answer", "Offer"]


@dataclass(frozen=True)
class Offer:
    """From a rank: its local plan."""

    digest: bytes
    share: bytes
    """Digest of the share that this rank was given for it last time; empty if none."""
    data: bytes | None
    """The encoded plan; None if the coordinator has it."""
    keep: tuple[bytes, ...] = ()
    """With ``data``: the digests of plans that this rank will not send again. All others can go."""

    def __iter__(self) -> NoReturn:
        # What DCP's own planner does first with the planner_data of all ranks.
        raise ConfigurationError(
            "some ranks plan with a DataStatesSavePlanner, and the coordinator does not: pass planners of one "
            "class on all ranks"
        )

    def __reduce__(self) -> Any:
        return Offer, astuple(self)


@dataclass(frozen=True)
class Answer:
    """To a rank: its share of the global plan."""

    whole: bytes
    """Names the global plan in the coordinator's memory."""
    digest: bytes
    data: bytes | None
    """The encoded share; None if the rank has it."""

    def __reduce__(self) -> Any:
        return Answer, astuple(self)
