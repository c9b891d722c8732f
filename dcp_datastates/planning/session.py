"""How a planner learns which save of this package's writer it plans for: through DCP's ``storage_meta``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_datastates.staging.fingerprint import Fingerprint
from dcp_datastates.staging.stage import StagedState

__all__ = ["Session", "SessionMeta"]


@dataclass(eq=False)
class Session:
    """One save, as its planner sees it, until :meth:`close`.

    Attributes:
        group: names the ranks that save together.
        rank: this process's among them.
        world: how many they are.
        staged: what was staged; None in a synchronous save, or if DCP has been given the state itself.
        state: the staged state dict with all tensors in it. Asking for it ends the shortcuts.
        taken: whether the planner has been set up with this, and not with the empty dict that DCP has in its place.
    """

    group: str
    rank: int
    world: int
    staged: StagedState | None
    state: Callable[[], dict[Any, Any]] | None
    taken: bool = False
    _fingerprint: Fingerprint | None = None
    _owned: tuple[bool, ...] | None = None

    def look(self) -> None:
        """Note what the state looks like. In the thread that captured it, before that goes on."""
        if self.staged is not None:
            self._fingerprint = self.staged.fingerprint()

    @property
    def fingerprint(self) -> Fingerprint | None:
        """What the state looked like at the :meth:`look`; None if plans for it are not kept."""
        return self._fingerprint

    @property
    def owned(self) -> tuple[bool, ...]:
        """Which staged tensors an optimizer owned at the call; empty without one."""
        if self._owned is None:
            self._owned = () if self.staged is None else self.staged.owned()
        return self._owned

    def close(self) -> None:
        """The state is no longer needed."""
        self.staged = self.state = None


@dataclass
class SessionMeta(StorageMeta):
    """``storage_meta()`` of this package's writer. Stays within the process."""

    session: Session | None = field(default=None, repr=False, compare=False)
