"""What a rank remembers of plans that it used: its shares, and how to find them in a state that looks the same.

Two things are kept, apart from each other:

- *Agreed plans*, by group of ranks. A plan with which all ranks have planned a save to the end is in the coordinator's
  memory (``plan_cache.py``), and this rank offers it by its digest alone.
- *Leaves*, by what a state looks like. A state that looks like an earlier one is not flattened, planned or laid out
  again: where its tensors lie in memory is looked up, and that is all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from torch.distributed.checkpoint.planner import SavePlan

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.io.devices import HOST
from dcp_datastates.planning.exchange import Answer, Offer, Session
from dcp_datastates.planning.local_plan import OBJECT, LocalPlan
from dcp_datastates.planning.prepared_write import Prepared
from dcp_datastates.planning.rank_plan import FinalPlan
from dcp_datastates.planning.replicas import Held
from dcp_datastates.staging.fingerprint import Fingerprint
from dcp_datastates.staging.stage import StagedState

__all__ = ["Foreseen", "KnownPlan", "Leaves", "RankMemory", "Share", "SharesPlanner"]

_KEPT_PLANS: Final = 8
"""Local plans that a rank may go back to: several state dicts may be saved in turn."""

_KEPT_SHARES: Final = 4


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

    def take(self, answer: Answer) -> Share:
        """The share that the coordinator answers with; from now on the latest.

        Raises :class:`DataStatesError` if it comes by its digest alone, and is not here.
        """
        share = self.shares.get(answer.digest)
        if share is None:
            if answer.data is None:
                raise DataStatesError("the coordinator answers with a share that this rank has not")
            final = FinalPlan.decode(answer.data)
            share = self.shares[answer.digest] = Share(
                final, SavePlan(final.write_items(self.plan))
            )
            while len(self.shares) > _KEPT_SHARES:
                self.shares.popitem(last=False)
        share.whole = answer.whole
        self.latest = answer.digest
        return share


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

    @staticmethod
    def of(
        known: KnownPlan, staged: StagedState, root: Any, mappings: Mapping[str, Sequence[Any]]
    ) -> Leaves | None:
        """Where the items of a plan are in the state that it was made of; None if that cannot be said by names.

        ``root`` is that state with all tensors in it, and ``mappings`` are DCP's paths in it.
        """
        columns = staged.traversal.columns
        # By name: one tensor may stand in several places, and other tensors in those the next time.
        place = {columns.name(position): position for position in range(len(columns.keys))}
        if len(place) != len(columns.keys):
            return None
        plan = known.plan
        is_tensor = plan.kinds != OBJECT
        positions = np.array([place.get(name, -1) for name in plan.names], np.int64)
        positions[~is_tensor] = -1
        if (positions[is_tensor] < 0).any():
            return None  # not the tensors that were staged
        paths = {}
        for name in compress(plan.names, ~is_tensor):
            path = _real_path(root, mappings.get(name, (name,)))
            if path is None:
                return None
            paths[name] = path
        return Leaves(known, positions, paths)

    def object(self, staged: StagedState, name: str) -> Any:
        """The object of this name in ``staged``."""
        value: Any = staged.root
        for key in self.paths[name]:
            value = value[key]
        return value

    def prepare(self, share: Share, rank: int) -> Prepared:
        """The files of the share, laid out once."""
        final = share.final
        prepared = self.prepared.get((rank, final.digest))
        if prepared is None:
            if len(self.prepared) >= _KEPT_SHARES:
                self.prepared.clear()
            prepared = self.prepared[rank, final.digest] = Prepared(
                share.plan.items, rank, self.positions[final.items], final.begins.tolist()
            )
        return prepared

    def held(self, staged: StagedState, items: Ints) -> Held:
        """Where the tensors of these items are in memory, when the copies that are made of them are there."""
        staged.copying.wait()
        leaves = self.positions[items]
        addresses, _, devices = staged.bases()
        sizes = self.known.plan.nbytes(items)
        if devices is not None:
            sizes[devices[leaves] != HOST] = 0
        return Held(addresses[leaves], sizes)


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

    def share_of(self, session: Session) -> Share | None:
        """What to write in the save that ``session`` is; None if this planner has not planned it."""

    def release(self, session: Session) -> None:
        """The save that ``session`` is has been read: hold nothing of its state."""

    def replicas(self, share: Share) -> tuple[Held, list[Any]]:
        """Where this rank's replicas of what several ranks write are in memory; and what must be kept meanwhile."""


_Looks = tuple[str, Fingerprint, tuple[bool, ...]]
"""What leaves are remembered by: the group, what the state looks like, and which of it optimizers own."""


class RankMemory:
    """What one rank remembers from save to save.

    A save that is planned passes :meth:`begin`, :meth:`offer` and :meth:`finish`, in this order. If it does not come
    to the end, the group's agreed plans are forgotten: nothing says what the coordinator has seen of it.

    Threads: one save at a time is planned; :meth:`foresee` any, also meanwhile.

    Args:
        by_owner: whether plans differ by what optimizers own.
    """

    def __init__(self, by_owner: bool) -> None:
        self._by_owner = by_owner
        self._agreed: dict[str, OrderedDict[bytes, KnownPlan]] = {}  # by group
        self._leaves: OrderedDict[_Looks, Leaves] = OrderedDict()
        self._planning: str | None = None  # the group, until the plan is finished

    def find(self, session: Session) -> Leaves | None:
        """How to find what is written in the save that ``session`` is; None if its state looks like no earlier one."""
        looks = self._looks(session)
        return None if looks is None else self._leaves.get(looks)

    def begin(self, group: str) -> None:
        """A save of these ranks is planned from here on."""
        if self._planning is not None:
            self._agreed.pop(self._planning, None)
        self._planning = group

    def offer(self, plan: LocalPlan) -> tuple[KnownPlan | None, Offer]:
        """What to tell the coordinator of this plan; and what is known of it, if all ranks have agreed on it.

        A plan that is new makes the oldest ones go, here and, as the offer says what is kept, at the coordinator.
        """
        agreed = self._of_group()
        known = agreed.get(plan.digest)
        if known is not None:
            agreed.move_to_end(plan.digest)
            return known, Offer(plan.digest, known.latest, None)
        while len(agreed) >= _KEPT_PLANS:
            agreed.popitem(last=False)
        return None, Offer(plan.digest, b"", plan.encode(), tuple(agreed))

    def finish(self, agreed: KnownPlan | None) -> None:
        """The save is planned to the end; all ranks have ``agreed`` on this plan, if it is to be remembered."""
        if agreed is not None:
            self._of_group()[agreed.plan.digest] = agreed
        self._planning = None

    def learn(
        self, session: Session, known: KnownPlan, root: Any, mappings: Mapping[str, Sequence[Any]]
    ) -> None:
        """Remember where the items of this plan are in a state that looks like that of ``session``.

        ``root`` and ``mappings`` as for :meth:`Leaves.of`.
        """
        looks = self._looks(session)
        if looks is None or session.staged is None:
            return
        leaves = Leaves.of(known, session.staged, root, mappings)
        if leaves is None:
            return
        self._leaves[looks] = leaves
        while len(self._leaves) > _KEPT_PLANS:
            self._leaves.popitem(last=False)

    def foresee(self, session: Session, serialize: Callable[[Any], bytes]) -> Foreseen | None:
        """What will be written if no rank's state looks otherwise than in the save before; None: that is not known."""
        staged = session.staged
        found = None if staged is None else self.find(session)
        share = None if found is None else found.known.shares.get(found.known.latest)
        if staged is None or found is None or share is None:
            return None
        prepared = found.prepared.get((session.rank, share.final.digest))
        if prepared is None:
            return None
        items = share.plan.items
        return Foreseen(
            share,
            prepared,
            lambda item: memoryview(serialize(found.object(staged, items[item].index.fqn))),
        )

    def _of_group(self) -> OrderedDict[bytes, KnownPlan]:
        assert self._planning is not None, "begin() comes first"
        return self._agreed.setdefault(self._planning, OrderedDict())

    def _looks(self, session: Session) -> _Looks | None:
        """None if plans for the state are not kept."""
        key = session.fingerprint
        if key is None:
            return None
        return session.group, key, session.owned if self._by_owner else ()


def _real_path(root: Any, path: Sequence[Any]) -> tuple[Any, ...] | None:
    """The keys themselves: DCP's paths have them as strings."""
    keys: list[Any] = []
    value = root
    for part in path:
        if isinstance(value, list) or part in value:
            key = part
        else:
            named = [other for other in value if str(other) == part]
            if len(named) != 1:
                return None
            key = named[0]
        keys.append(key)
        value = value[key]
    return tuple(keys)
