"""The plan cache: what a rank and the coordinator keep of plans, so that an unchanged one is named by its digest.

What the other side has, it has said itself: a rank offers its plan with the digest of the share that it has for it, and
the coordinator answers with the digest of the report that it has from this rank. Only of plans must a rank know what
the coordinator keeps. Both keep the plans that they used last. A rank counts a plan when it has the coordinator's
answer; and if a save's planning breaks off, it forgets what the coordinator has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.key_paths import key_of
from dcp_datastates.format.metadata_table import Catalog
from dcp_datastates.format.ragged import Ints
from dcp_datastates.io.devices import HOST
from dcp_datastates.planning.global_plan import GlobalPlan
from dcp_datastates.planning.messages import OBJECT, Head, LocalPlan, Offer, RankPlan
from dcp_datastates.planning.part_files import KnownFiles, Recent
from dcp_datastates.planning.samples import Held
from dcp_datastates.staging.stage import StagedState
from dcp_datastates.staging.traverse import Fingerprint

Agreed = Recent[bytes, RankPlan]
"""Of a rank's plans that the coordinator has, by digest: the latest share."""


StateKey = tuple[str, int, Fingerprint, tuple[bool, ...]]
"""What a state's plan follows from: the group, this rank's number in it, the state's fingerprint, and which tensors
optimizers own.
"""


@dataclass(frozen=True, eq=False)
class KnownState:
    """The plan of states with one :data:`StateKey`, and where its items are in such a state. A state that is known so
    is not flattened, planned or laid out again.
    """

    plan: LocalPlan
    positions: Ints
    """By item: the tensor's position in the traversal; -1 for an object."""
    paths: dict[str, tuple[Any, ...]]
    """For each object: the keys of its path."""
    files_of_shares: Recent[bytes, KnownFiles] = field(default_factory=Recent)
    """By the share's digest."""

    @staticmethod
    def of(
        plan: LocalPlan, staged: StagedState, state: Any, paths: Mapping[str, Sequence[Any]]
    ) -> KnownState | None:
        """Where the plan's items are in the state that was planned; None if names do not identify them.

        ``state`` has all its tensors, and ``paths`` are those in it (``key_paths.py``).
        """
        columns = staged.traversal.columns
        # By name: one tensor may occur in several places, where the next state may have different tensors.
        place = {columns.name(position): position for position in range(len(columns.keys))}
        if len(place) != len(columns.keys):
            return None
        names, is_tensor = plan.head.names, plan.head.kinds != OBJECT
        positions = np.array([place.get(name, -1) for name in names], np.int64)
        positions[~is_tensor] = -1
        if (positions[is_tensor] < 0).any():
            return None  # these are not the staged tensors
        keys = {}
        for name in compress(names, ~is_tensor):
            path = _real_path(state, paths.get(name, (name,)))
            if path is None:
                return None
            keys[name] = path
        return KnownState(plan, positions, keys)

    def object(self, staged: StagedState, name: str) -> Any:
        """The object with this name in ``staged``."""
        value: Any = staged.root
        for key in self.paths[name]:
            value = value[key]
        return value

    def files(self, share: RankPlan, rank: int) -> KnownFiles:
        """The files of a share of the plan, laid out once."""
        files = self.files_of_shares.get(share.digest)
        if files is None:
            items, begins = share.layout_items(self.plan), share.begins.tolist()
            files = KnownFiles(items, rank, self.positions[share.items], begins)
            self.files_of_shares.put(share.digest, files)
        return files

    def held(self, staged: StagedState, items: Ints) -> Held:
        """The addresses of the tensors of these items, after waiting for their eager copies; of objects, none."""
        staged.copying.wait()
        positions = self.positions[items]
        tensors = np.flatnonzero(positions >= 0)
        positions = positions[tensors]
        held = Held(np.zeros(len(items), np.int64), np.zeros(len(items), np.int64))
        addresses, _, devices = staged.bases()
        sizes = self.plan.nbytes(items[tensors])
        if devices is not None:
            sizes[devices[positions] != HOST] = 0
        held.addresses[tensors], held.sizes[tensors] = addresses[positions], sizes
        return held


def _real_path(root: Any, path: Sequence[Any]) -> tuple[Any, ...] | None:
    """The actual keys of a path, which may have a key as a string that cannot be stored."""
    keys: list[Any] = []
    value = root
    for part in map(key_of, path):
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


Assign = Callable[[Sequence[LocalPlan]], tuple[list[RankPlan], Catalog]]


class PlanCache:
    """The plan cache of one planner, or of all saves without a planner of the caller's, for any groups of ranks. Any
    thread may use it, for one save of a group at a time.
    """

    def __init__(self) -> None:
        self.states: Recent[StateKey, KnownState] = Recent()
        self._agreed: dict[str, Agreed] = {}  # by group
        # On the coordinator: each rank's plans, and those of all ranks.
        self._plans: dict[tuple[str, int], Recent[bytes, LocalPlan]] = {}
        self._global_plans: Recent[tuple[Hashable, ...], GlobalPlan] = Recent()

    def begin(self, group: str) -> Agreed:
        """What the coordinator has of this rank's plans. Until :meth:`end`, that counts as unknown."""
        return self._agreed.pop(group, None) or Agreed()

    def end(self, group: str, agreed: Agreed) -> None:
        """The planning of a save is completed: the coordinator has these plans."""
        self._agreed[group] = agreed

    def plan(
        self, group: str, offers: Sequence[Offer], assign: Assign, options: Hashable = None
    ) -> GlobalPlan:
        """The coordinator's global plan for the ranks' offers.

        ``options`` determine how ``assign`` assigns shares. Raises ValueError for plans that do not fit together, and
        :class:`DataStatesError` for an unknown digest.
        """
        heads: dict[bytes, Head] = {}
        plans = [self._plan(group, rank, offer, heads) for rank, offer in enumerate(offers)]
        key = (options, *(offer.digest for offer in offers))
        found = self._global_plans.get(key)
        if found is None:
            found = GlobalPlan(plans, *assign(plans))
            self._global_plans.put(key, found)
        return found

    def _plan(self, group: str, rank: int, offer: Offer, heads: dict[bytes, Head]) -> LocalPlan:
        known = self._plans.setdefault((group, rank), Recent())
        plan = LocalPlan.decode(offer.data, heads) if offer.data else known.get(offer.digest)
        if plan is None:
            raise DataStatesError(
                f"rank {rank} offers a plan that the coordinator has not seen: did the ranks use different "
                f"planner objects before? The next save will send it"
            )
        known.put(offer.digest, plan)
        return plan
