"""The coordinator's plan cache: every rank's local plans, and the global plans made from them.

Ranks send a digest only for plans that the coordinator has cached: a rank does so only after a save whose planning was
completed, and every new plan comes with the list of plans to keep.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import numpy as np

from dcp_datastates.errors import ConfigurationError, DataStatesError
from dcp_datastates.format.chunk_table import Catalog, Ints, Placement
from dcp_datastates.format.lazy_metadata import FIELDS, PublishedMetadata
from dcp_datastates.planning.exchange import Answer, Offer, RankReport, Report
from dcp_datastates.planning.local_plan import Head, LocalPlan
from dcp_datastates.planning.rank_plan import RankPlan
from dcp_datastates.planning.replicas import Samples
from dcp_datastates.process.lazily import lazily

__all__ = ["GlobalPlan", "PlanCache", "PlannedMetadata"]

_KEPT_GLOBAL_PLANS: Final = 8
_KEPT_REPORTS: Final = 4

Assign = Callable[[Sequence[LocalPlan]], tuple[list[RankPlan], Catalog]]


class GlobalPlan:
    """One global plan.

    ``name`` is unique: two global plans with the same content have different names.
    """

    def __init__(
        self, locals_: Sequence[LocalPlan], shares: Sequence[RankPlan], catalog: Catalog
    ) -> None:
        self.name: Final = os.urandom(8)
        self.shares: Final = shares
        self.catalog: Final = catalog
        self._locals = locals_
        self._reports: list[OrderedDict[bytes, Report]] = [OrderedDict() for _ in shares]

    @lazily
    def samples(self) -> Samples:
        """Compares the ranks' samples of the same tensors."""
        return Samples(self._locals, self.shares)

    def take(self, rank: int, sent: RankReport) -> Report:
        """The report that ``rank`` sent, now or, for a digest alone, before."""
        known = self._reports[rank]
        if sent.data is not None:
            known[sent.digest] = Report.decode(sent.data)
        report = known.get(sent.digest)
        if report is None:
            raise DataStatesError(
                f"rank {rank} sent the digest of a report that is not cached here"
            )
        known.move_to_end(sent.digest)
        while len(known) > _KEPT_REPORTS:
            known.popitem(last=False)
        return report

    @lazily
    def _slots(self) -> list[Ints]:
        """For each rank, its items' places in the chunk table: the number of a chunk, or ``-1 - n`` for
        object ``n``.
        """
        catalog = self.catalog
        first: Ints = np.cumsum(catalog.counts) - catalog.counts
        number = np.cumsum(catalog.properties < 0) - 1
        position = {name: index for index, name in enumerate(catalog.names)}
        of_names: dict[int, Ints] = {}
        slots = []
        for local, share in zip(self._locals, self.shares, strict=True):
            names = of_names.get(id(local.names))
            if names is None:
                names = np.array([position[name] for name in local.names], np.int64)
                of_names[id(local.names)] = names
            mine = names[share.items]
            slots.append(
                np.where(share.hints >= 0, first[mine] + share.hints, -1 - number[mine])
                if len(mine)
                else mine
            )
        return slots

    def placement(self, reports: Sequence[Report], prefix: str) -> Placement:
        """The place of every item, with the data files below ``prefix``."""
        catalog = self.catalog
        chunks = [np.zeros(int(catalog.counts.sum()), np.int64) for _ in range(3)]
        objects = [np.zeros(int((catalog.properties < 0).sum()), np.int64) for _ in range(3)]
        paths: list[str] = []
        for slots, report in zip(self._slots, reports, strict=True):
            columns = (report.numbers + len(paths), report.offsets, report.lengths)
            paths += [f"{prefix}/{name}" for name, _, _ in report.files]
            tensors = slots >= 0
            for target, source in zip(chunks, columns, strict=True):
                target[slots[tensors]] = source[tensors]
            if not tensors.all():
                for target, source in zip(objects, columns, strict=True):
                    target[-1 - slots[~tensors]] = source[~tensors]
        return Placement(tuple(paths), *chunks, *objects)


class PlannedMetadata(PublishedMetadata):
    """The metadata of a save on its coordinator, in columns. Other ranks have a :class:`PublishedMetadata`.

    Until the save is written, reading or changing a field raises :class:`DataStatesError`.
    """

    def __init__(self, global_plan: GlobalPlan) -> None:
        super().__init__()
        self.global_plan = global_plan
        self.reports: list[Report] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIELDS and not self.directory:
            raise ConfigurationError(
                f"{name} cannot be assigned to: the metadata of this save are made of its plan when all ranks have "
                f"written; change them in create_global_plan() of a class derived from DataStatesSavePlanner"
            )
        super().__setattr__(name, value)

    def consolidate(
        self, results: Sequence[Sequence[object]], directory: str, attempt: str
    ) -> None:
        """Take all ranks' reports, and compare their samples. Raises :class:`DataStatesError`."""
        self.directory, self.attempt = directory, attempt
        samples: list[bytes] = []
        for rank, mine in enumerate(results):
            if len(mine) != 1 or not isinstance(mine[0], RankReport):
                raise ConfigurationError(
                    f"rank {rank} planned with a DataStatesSavePlanner and wrote with another planner, one that "
                    f"wraps it, say: pass the DataStatesSavePlanner itself, or derive from it"
                )
            self.reports.append(self.global_plan.take(rank, mine[0]))
            samples.append(mine[0].samples)
        self.global_plan.samples.check(samples)


class PlanCache:
    """The plan cache. For one thread at a time: saves take turns. Keys name groups of ranks."""

    def __init__(self, assign: Assign) -> None:
        self._assign = assign
        self._plans: dict[tuple[str, int], dict[bytes, LocalPlan]] = {}
        self._global_plans: OrderedDict[tuple[Hashable, ...], GlobalPlan] = OrderedDict()

    def plan(
        self,
        group: str,
        offers: Sequence[Offer],
        own: Callable[[bytes], LocalPlan | None],
        options: Hashable = None,
    ) -> tuple[list[Answer], GlobalPlan]:
        """The global plan for the ranks' offers, and the answers to the ranks.

        ``own`` finds plans of this process itself; ``options`` determine how shares are assigned. Raises ValueError for
        plans that do not fit together, and :class:`DataStatesError` for an unknown digest.
        """
        key = (options, *(offer.digest for offer in offers))
        heads: dict[bytes, Head] = {}
        locals_ = [self._plan(group, rank, offer, heads, own) for rank, offer in enumerate(offers)]
        global_plan = self._global_plans.get(key)
        if global_plan is None:
            global_plan = GlobalPlan(locals_, *self._assign(locals_))
            self._global_plans[key] = global_plan
            while len(self._global_plans) > _KEPT_GLOBAL_PLANS:
                self._global_plans.popitem(last=False)
        self._global_plans.move_to_end(key)
        answers = [
            Answer(
                global_plan.name,
                share.digest,
                None if offer.share == share.digest else share.encode(),
            )
            for offer, share in zip(offers, global_plan.shares, strict=True)
        ]
        return answers, global_plan

    def _plan(
        self,
        group: str,
        rank: int,
        offer: Offer,
        heads: dict[bytes, Head],
        own: Callable[[bytes], LocalPlan | None],
    ) -> LocalPlan:
        known = self._plans.setdefault((group, rank), {})
        if offer.data is not None:
            kept = {digest: known[digest] for digest in offer.keep if digest in known}
            kept[offer.digest] = LocalPlan.decode(offer.data, heads)
            self._plans[group, rank] = kept
            return kept[offer.digest]
        plan = known.get(offer.digest) or own(offer.digest)
        if plan is None:
            raise DataStatesError(
                f"rank {rank} offers a plan that the coordinator has not seen: did the ranks use different "
                f"planner objects before? The next save will send it"
            )
        return plan
