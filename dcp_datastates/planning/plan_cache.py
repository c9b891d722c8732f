"""The coordinator's plan cache: every rank's local plans, and the global plans made from them.

Ranks send a digest only for plans that the coordinator has cached: a rank does so only after a save whose planning was
completed, and every new plan comes with the list of plans to keep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.chunk_table import Catalog
from dcp_datastates.planning.exchange import Answer, Offer
from dcp_datastates.planning.global_plan import GlobalPlan
from dcp_datastates.planning.local_plan import Head, LocalPlan
from dcp_datastates.planning.rank_plan import RankPlan

__all__ = ["PlanCache"]

_KEPT_GLOBAL_PLANS: Final = 8

Assign = Callable[[Sequence[LocalPlan]], tuple[list[RankPlan], Catalog]]


class PlanCache:
    """The plan cache. For one thread at a time. Keys name groups of ranks."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, int], dict[bytes, LocalPlan]] = {}
        self._global_plans: OrderedDict[tuple[Hashable, ...], GlobalPlan] = OrderedDict()

    def plan(
        self,
        group: str,
        offers: Sequence[Offer],
        assign: Assign,
        options: Hashable = None,
    ) -> tuple[list[Answer], GlobalPlan]:
        """The global plan for the ranks' offers, and the answers to the ranks.

        ``options`` determine how ``assign`` assigns shares. Raises ValueError for plans that do not fit together, and
        :class:`DataStatesError` for an unknown digest.
        """
        key = (options, *(offer.digest for offer in offers))
        heads: dict[bytes, Head] = {}
        locals_ = [self._plan(group, rank, offer, heads) for rank, offer in enumerate(offers)]
        global_plan = self._global_plans.get(key)
        if global_plan is None:
            global_plan = GlobalPlan(locals_, *assign(locals_))
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

    def _plan(self, group: str, rank: int, offer: Offer, heads: dict[bytes, Head]) -> LocalPlan:
        known = self._plans.setdefault((group, rank), {})
        if offer.data is not None:
            kept = {digest: known[digest] for digest in offer.keep if digest in known}
            kept[offer.digest] = LocalPlan.decode(offer.data, heads)
            self._plans[group, rank] = kept
            return kept[offer.digest]
        plan = known.get(offer.digest)
        if plan is None:
            raise DataStatesError(
                f"rank {rank} offers a plan that the coordinator has not seen: did the ranks use different "
                f"planner objects before? The next save will send it"
            )
        return plan
