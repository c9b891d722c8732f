"""What a rank remembers of plans that it used: its shares, and how to find them in a state that looks the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch.distributed.checkpoint.planner import SavePlan

from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.planning.exchange import Session
from dcp_datastates.planning.local_plan import LocalPlan
from dcp_datastates.planning.prepared_write import Prepared
from dcp_datastates.planning.rank_plan import FinalPlan
from dcp_datastates.planning.replicas import Held
from dcp_datastates.staging.stage import StagedState

__all__ = ["Foreseen", "KnownPlan", "Leaves", "Share", "SharesPlanner"]


@dataclass(eq=False)
class Share:
    """What this rank writes in a global plan, and what is known about writing it."""

    final: FinalPlan
    plan: SavePlan
    told: dict[bytes, bytes] = field(default_factory=dict)
    """By global plan: the digest of the report that its coordinator has."""
    sent: bytes = b""
    """Digest of the newest report."""
    whole: bytes = b""
    """The global plan of the newest save."""


@dataclass(eq=False)
class KnownPlan:
    """A local plan that was used, and the shares that were given for it."""

    plan: LocalPlan
    shares: OrderedDict[bytes, Share] = field(default_factory=OrderedDict)
    latest: bytes = b""
    """Digest of the newest share; empty if there is none."""


@dataclass(eq=False)
class Leaves:
    """How the items of a local plan are found in a staged state that looks the same."""

    known: KnownPlan
    positions: Ints
    """By item: the tensor's position in the traversal; -1 for an object."""
    paths: dict[str, tuple[Any, ...]]
    """Of the objects: the keys that lead there."""
    prepared: dict[tuple[int, bytes], Prepared] = field(default_factory=dict)
    """By rank (of DCP's group: files are named after it) and digest of the share."""

    def object(self, staged: StagedState, name: str) -> Any:
        """The object of this name in ``staged``."""
        value: Any = staged.root
        for key in self.paths[name]:
            value = value[key]
        return value


@dataclass(frozen=True, eq=False)
class Foreseen:
    """A share that will be written again, most likely."""

    share: Share
    prepared: Prepared
    resolve: Callable[[int], memoryview]
    """Serializes the object of an item."""


@runtime_checkable
class SharesPlanner(Protocol):
    """A planner that knows how its shares are written."""

    def foresee(self, session: Session) -> Foreseen | None:
        """What will be written if no rank's state looks otherwise than in the save before."""

    def prepare(self, share: Share, rank: int) -> Prepared | None:
        """The share's files, to be written from what was staged; None if that cannot be."""

    def replicas(self, share: Share) -> tuple[Held, list[Any]]:
        """Where this rank's replicas of what several ranks write are in memory; and what must be kept meanwhile."""
