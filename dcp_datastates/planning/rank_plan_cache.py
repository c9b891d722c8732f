"""A rank's own plan cache: the plans and shares that it used, and how to find their items in a state with the same
fingerprint.

It has two parts:

- *Agreed plans*, by commit group. If all ranks have completed the planning of a save with a plan, the coordinator has
  cached it (``plan_cache.py``), and this rank offers it by digest alone.
- *Leaves*, by fingerprint. A state with the fingerprint of an earlier one is not flattened, planned or laid out again:
  the rank only looks up the addresses of its tensors.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final

import numpy as np
from torch.distributed.checkpoint.planner import WriteItem

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.format.key_paths import key_of
from dcp_datastates.io.devices import HOST
from dcp_datastates.planning.exchange import Answer, Offer
from dcp_datastates.planning.local_plan import OBJECT, LocalPlan
from dcp_datastates.planning.prepared_write import Prepared
from dcp_datastates.planning.rank_plan import RankPlan
from dcp_datastates.planning.replicas import Held
from dcp_datastates.staging.fingerprint import Fingerprint
from dcp_datastates.staging.stage import StagedState

__all__ = ["KnownPlan", "Leaves", "Looks", "RankPlanCache", "Share"]

_KEPT_PLANS: Final = 8
"""How many local plans are kept: a job may save several state dicts in turn."""

_KEPT_SHARES: Final = 4


@dataclass(eq=False)
class Share:
    """This rank's share of a global plan, with the state of its reports."""

    plan: LocalPlan
    final: RankPlan
    reported: dict[bytes, bytes] = field(default_factory=dict)
    """By global plan: the digest of the report that the coordinator has."""
    sent: bytes = b""
    """Digest of the latest report."""

    @functools.cached_property
    def items(self) -> list[WriteItem]:
        """The share's items. A share that is written as it was prepared does not need them."""
        return self.final.write_items(self.plan)


@dataclass(eq=False)
class KnownPlan:
    """A local plan that was used, and the shares that the coordinator has sent for it."""

    plan: LocalPlan
    shares: OrderedDict[bytes, Share] = field(default_factory=OrderedDict)
    latest: bytes = b""
    """Digest of the latest share; empty if there is none."""

    def take(self, answer: Answer) -> Share:
        """The share in the coordinator's answer; it becomes the latest.

        Raises :class:`DataStatesError` if the answer has only a digest, and this rank does not have the share.
        """
        share = self.shares.get(answer.digest)
        if share is None:
            if answer.data is None:
                raise DataStatesError("the coordinator answers with a share that this rank has not")
            final = RankPlan.decode(answer.data)
            share = self.shares[answer.digest] = Share(self.plan, final)
            while len(self.shares) > _KEPT_SHARES:
                self.shares.popitem(last=False)
        self.latest = answer.digest
        return share


@dataclass(eq=False)
class Leaves:
    """The places of a local plan's items in staged states with one fingerprint."""

    known: KnownPlan
    positions: Ints
    """By item: the tensor's position in the traversal; -1 for an object."""
    paths: dict[str, tuple[Any, ...]]
    """For each object: the keys of its path."""
    prepared: dict[tuple[int, bytes], Prepared] = field(default_factory=dict)
    """By rank in DCP's group (which the files' names contain) and digest of the share."""

    @staticmethod
    def of(
        known: KnownPlan, staged: StagedState, root: Any, mappings: Mapping[str, Sequence[Any]]
    ) -> Leaves | None:
        """The places of a plan's items in the state that was planned; None if names do not identify them.

        ``root`` is that state with all its tensors, and ``mappings`` are the paths in it (``key_paths.py``).
        """
        columns = staged.traversal.columns
        # By name: one tensor may occur in several places, where the next state may have different tensors.
        place = {columns.name(position): position for position in range(len(columns.keys))}
        if len(place) != len(columns.keys):
            return None
        plan = known.plan
        is_tensor = plan.kinds != OBJECT
        positions = np.array([place.get(name, -1) for name in plan.names], np.int64)
        positions[~is_tensor] = -1
        if (positions[is_tensor] < 0).any():
            return None  # these are not the staged tensors
        paths = {}
        for name in compress(plan.names, ~is_tensor):
            path = _real_path(root, mappings.get(name, (name,)))
            if path is None:
                return None
            paths[name] = path
        return Leaves(known, positions, paths)

    def object(self, staged: StagedState, name: str) -> Any:
        """The object with this name in ``staged``."""
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
                final.layout_items(share.plan),
                rank,
                self.positions[final.items],
                final.begins.tolist(),
            )
        return prepared

    def held(self, staged: StagedState, items: Ints) -> Held:
        """The addresses of the tensors of these items, after waiting for their eager copies; of objects, none."""
        staged.copying.wait()
        leaves = self.positions[items]
        tensors = np.flatnonzero(leaves >= 0)
        leaves = leaves[tensors]
        held = Held(np.zeros(len(items), np.int64), np.zeros(len(items), np.int64))
        addresses, _, devices = staged.bases()
        sizes = self.known.plan.nbytes(items[tensors])
        if devices is not None:
            sizes[devices[leaves] != HOST] = 0
        held.addresses[tensors], held.sizes[tensors] = addresses[leaves], sizes
        return held


Looks = tuple[str, Fingerprint, tuple[bool, ...]]
"""The key of leaves: the group, the state's fingerprint, and which tensors optimizers own."""


class RankPlanCache:
    """One rank's plan cache.

    Planning a save calls :meth:`begin`, :meth:`offer` and :meth:`finish`, in this order. If planning is not completed,
    the group's agreed plans are dropped: it is unknown which of them the coordinator has.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._agreed: dict[str, OrderedDict[bytes, KnownPlan]] = {}  # by group
        self._leaves: OrderedDict[Looks, Leaves] = OrderedDict()
        self._planning: set[str] = set()  # the groups whose planning is not completed

    def find(self, looks: Looks | None) -> Leaves | None:
        """The leaves for a state that looks so; None if there are none."""
        return None if looks is None else self._leaves.get(looks)

    def begin(self, group: str) -> None:
        """Begin to plan a save of these ranks."""
        if group in self._planning:
            self._agreed.pop(group, None)
        self._planning.add(group)

    def offer(self, group: str, plan: LocalPlan) -> tuple[KnownPlan | None, Offer]:
        """The offer of this plan for the coordinator; and the known plan, if all ranks have agreed on it.

        A new plan evicts the oldest ones, here and at the coordinator: the offer lists the plans to keep.
        """
        agreed = self._agreed.setdefault(group, OrderedDict())
        known = agreed.get(plan.digest)
        if known is not None:
            agreed.move_to_end(plan.digest)
            return known, Offer(plan.digest, known.latest, None)
        while len(agreed) >= _KEPT_PLANS:
            agreed.popitem(last=False)
        return None, Offer(plan.digest, b"", plan.encode(), tuple(agreed))

    def finish(self, group: str, agreed: KnownPlan | None) -> None:
        """End the planning of the save. All ranks have ``agreed`` on this plan; None: do not cache it."""
        if agreed is not None:
            self._agreed.setdefault(group, OrderedDict())[agreed.plan.digest] = agreed
        self._planning.discard(group)

    def learn(self, looks: Looks, leaves: Leaves) -> None:
        """Cache the ``leaves`` for states that look so."""
        self._leaves[looks] = leaves
        while len(self._leaves) > _KEPT_PLANS:
            self._leaves.popitem(last=False)


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
