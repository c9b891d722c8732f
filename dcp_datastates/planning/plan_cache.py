"""The plan cache: what a rank and the coordinator keep of plans, so that an unchanged one is named by its digest. The
coordinator's global plan has every rank's share, and makes the metadata of what the ranks report.

What the other side has, it has said itself: a rank offers its plan with the digest of the share that it has for it, and
the coordinator answers with the digest of the report that it has from this rank. Only of plans must a rank know what
the coordinator keeps. Both keep the plans that they used last. A rank counts a plan when it has the coordinator's
answer; and if a save's planning breaks off, it forgets what the coordinator has.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

import numpy as np

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.metadata import encode
from dcp_datastates.format.metadata_table import (
    Catalog,
    Compared,
    FileRecord,
    MetadataTable,
    Note,
    Placement,
    Trace,
)
from dcp_datastates.format.ragged import Ints
from dcp_datastates.planning.comparison import Comparison, Turn
from dcp_datastates.planning.messages import (
    Answer,
    Head,
    LocalPlan,
    Offer,
    RankPlan,
    RankReport,
    Report,
)
from dcp_datastates.planning.part_files import KnownState, Recent
from dcp_datastates.planning.samples import Samples
from dcp_datastates.staging.staged_state import Fingerprint
from dcp_datastates.storage.claims import Claim

Agreed = Recent[bytes, RankPlan]
"""Of a rank's plans that the coordinator has, by digest: the latest share."""


StateKey = tuple[str, int, Fingerprint, tuple[bool, ...]]
"""What a state's plan follows from: the group, this rank's number in it, the state's fingerprint, and which tensors
optimizers own.
"""


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
        plans = []
        for rank, offer in enumerate(offers):
            known = self._plans.setdefault((group, rank), Recent())
            plan = LocalPlan.decode(offer.data, heads) if offer.data else known.get(offer.digest)
            if plan is None:
                raise DataStatesError(
                    f"rank {rank} offers a plan that the coordinator has not seen: did the ranks use different "
                    f"planner objects before? The next save will send it"
                )
            known.put(offer.digest, plan)
            plans.append(plan)
        key = (options, *(offer.digest for offer in offers))
        found = self._global_plans.get(key)
        if found is None:
            found = GlobalPlan(plans, *assign(plans))
            self._global_plans.put(key, found)
        return found


# ---- the global plan -----------------------------------------------------------------------------


def note_of(
    claim: Claim,
    reports: Sequence[Report],
    metrics: Mapping[str, float],
    trace: Trace,
    compared: Compared | None = None,
) -> Note:
    """What the metadata tell of the attempt and its files, which all ranks have reported."""
    files = {}
    for report in reports:
        for name, nbytes, table_offset in report.files:
            path = f"{claim.attempt.name}/{name}"
            files[path] = FileRecord(path, nbytes, table_offset)
    return Note(claim.attempt, files, claim.after, metrics, time.time(), trace, compared)


class GlobalPlan:
    """One global plan, with the latest report of each rank. Any thread may use it."""

    def __init__(
        self, locals_: Sequence[LocalPlan], shares: Sequence[RankPlan], catalog: Catalog
    ) -> None:
        self.shares: Final = shares
        self.catalog: Final = catalog
        self._locals = locals_
        self._reports: list[Report | None] = [None] * len(shares)

    @property
    def reports(self) -> Sequence[Report | None]:
        """The latest report of each rank, as they are now."""
        return tuple(self._reports)

    def answers(
        self, known: Sequence[bytes], reports: Sequence[Report | None], turn: Turn | None = None
    ) -> list[Answer]:
        """The answers to ranks that have the shares with these digests, where the coordinator has the ``reports``."""
        return [
            Answer(
                share.digest,
                b"" if report is None else report.digest,
                turn and (turn.number, turn.of),
                b"" if share.digest == digest else share.encoded,
            )
            for share, digest, report in zip(self.shares, known, reports, strict=True)
        ]

    @functools.cached_property
    def _samples(self) -> Samples:
        """Compares the ranks' samples of the same tensors."""
        return Samples(self._locals, self.shares)

    @functools.cached_property
    def comparison(self) -> Comparison:
        """Compares the ranks' replicas byte for byte."""
        return Comparison(self._locals, self.shares)

    def compose(
        self,
        known: Sequence[Report | None],
        metrics: Mapping[str, float],
        sent: Sequence[bytes],
        claim: Claim,
        trace: Trace,
        compare: Callable[[Sequence[bytes]], Compared] | None = None,
    ) -> bytes:
        """The metadata of all ranks' reports, each ``sent`` in full or one of those ``known``.

        ``sent``, ``claim`` and ``trace`` are those of :data:`Compose`; ``compare`` compares the ranks' replicas. Raises
        :class:`DataStatesError` if they differ, say.
        """
        reports = list(map(RankReport.decode, sent))
        places = []
        for rank, (report, before) in enumerate(zip(reports, known, strict=True)):
            place = Report.decode(report.data) if report.data else before
            if place is None or place.digest != report.digest:
                raise DataStatesError(
                    f"rank {rank} sent the digest of a report that the coordinator does not have"
                )
            self._reports[rank] = place
            places.append(place)
        if len(reports) > 1:
            self._samples.check([each.samples for each in reports])
        compared = None if compare is None else compare([each.sums for each in reports])
        note = note_of(claim, places, metrics, trace, compared)
        placement = self._placement(places, claim.attempt.name)
        return encode(MetadataTable(self.catalog, placement, note))

    @functools.cached_property
    def _slots(self) -> list[Ints]:
        """For each rank, its items' rows in the placement."""
        catalog = self.catalog
        first: Ints = np.cumsum(catalog.counts) - catalog.counts
        objects = catalog.chunks + np.cumsum(catalog.properties < 0) - 1
        position = {name: index for index, name in enumerate(catalog.names)}
        of_names: dict[int, Ints] = {}
        slots = []
        for local, share in zip(self._locals, self.shares, strict=True):
            names = of_names.get(id(local.head))
            if names is None:
                names = np.array([position[name] for name in local.head.names], np.int64)
                of_names[id(local.head)] = names
            mine = names[share.items]
            slots.append(
                np.where(share.hints >= 0, first[mine] + share.hints, objects[mine])
                if len(mine)
                else mine
            )
        return slots

    def _placement(self, reports: Sequence[Report], prefix: str) -> Placement:
        """The place of every item, with the data files below ``prefix``."""
        rows = self.catalog.chunks + int((self.catalog.properties < 0).sum())
        placed = [np.zeros(rows, np.int64) for _ in range(3)]
        paths: list[str] = []
        for slots, report in zip(self._slots, reports, strict=True):
            columns = (report.numbers + len(paths), report.offsets, report.lengths)
            paths += [f"{prefix}/{name}" for name, _, _ in report.files]
            for target, source in zip(placed, columns, strict=True):
                target[slots] = source
        return Placement(tuple(paths), *placed)
