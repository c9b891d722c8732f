"""Planning in columns, with caches: what ``DataStatesSavePlanner`` does for this package's pipeline.

If a state has the structure of an earlier one, it is not flattened, and the ranks exchange digests in place of plans.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_datastates.format.chunk_table import Catalog
from dcp_datastates.format.metadata_table import Compose
from dcp_datastates.format.validate import validate
from dcp_datastates.io.tensor_memory import local_tensor
from dcp_datastates.planning.balance import assign
from dcp_datastates.planning.declared import declared
from dcp_datastates.planning.differing import is_nothing, word_of
from dcp_datastates.planning.exchange import Answer, Offer, RankReport
from dcp_datastates.planning.flat_state import FlatState
from dcp_datastates.planning.global_plan import GlobalPlan
from dcp_datastates.planning.local_plan import OBJECT, LocalPlan
from dcp_datastates.planning.plan_cache import PlanCache
from dcp_datastates.planning.prepared_write import Prepared, report_of
from dcp_datastates.planning.rank_plan import RankPlan
from dcp_datastates.planning.rank_plan_cache import (
    KnownPlan,
    Leaves,
    Looks,
    RankPlanCache,
    Share,
)
from dcp_datastates.planning.replicas import Held, sample
from dcp_datastates.planning.save_planning import WriteJob
from dcp_datastates.planning.serializer import Serializer
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.staging.fingerprint import Fingerprint
from dcp_datastates.staging.stage import StagedState
from dcp_datastates.storage.attempt import Attempt

__all__ = ["ColumnPlanning", "Paths", "PlanOptions", "RankPlanner", "StateToPlan", "assign_shares"]

Paths = Mapping[str, tuple[Any, ...]]
"""The path of each name of a flattened state: the keys on the way to its value."""

_SHOWN_ERRORS: Final = 500


@dataclass(frozen=True)
class PlanOptions:
    """The options of :class:`~dcp_datastates.DataStatesSavePlanner`."""

    flatten: bool = True
    flatten_shards: bool = True
    to_lowest_rank: bool = False
    cache: bool = True
    split: bool = True


@dataclass
class RankPlanner:
    """One rank's plan caches, for any number of saves. Any thread may use it."""

    lock: contextlib.AbstractContextManager[bool] = field(default_factory=threading.RLock)
    """Guards the caches. No thread waits for another rank while it holds the lock."""
    of_rank: RankPlanCache = field(default_factory=RankPlanCache)
    of_coordinator: PlanCache = field(default_factory=PlanCache)
    serializer: Serializer = field(default_factory=Serializer)


@dataclass(frozen=True, eq=False)
class StateToPlan:
    """A state at the call."""

    staged: StagedState
    fingerprint: Fingerprint | None
    """Its fingerprint at the call; None if plans for it are not cached."""
    build: Callable[[], dict[Any, Any]]
    """Builds the state with all its tensors. Called once at most."""
    paths: Paths | None = None
    """The path of each key of the state, if DCP's planner has flattened it already."""

    def paths_of(self, found: Paths | None) -> Paths | None:
        """The paths in the program's state, where ``found`` are those in this one."""
        if self.paths is None or found is None:
            return found
        return {
            name: (*self.paths.get(path[0], path[:1]), *path[1:]) for name, path in found.items()
        }


class ColumnPlanning:
    """Planning of one save by ``planner`` (a :class:`~dcp_datastates.planning.save_planning.SavePlanning`)."""

    kind = "in columns"

    def __init__(self, planner: RankPlanner, options: PlanOptions, state: StateToPlan) -> None:
        self._planner = planner
        self._options = options
        self._state: StateToPlan | None = state
        self._group, self._rank = "", 0
        self._looks: Looks | None = None
        self._found: Leaves | None = None
        self._flat: FlatState | None = None
        self._root: dict[Any, Any] = {}
        self._known: KnownPlan | None = None
        self._share: Share | None = None
        self._plan_name = b""
        self._global_plan: GlobalPlan | None = None  # on the coordinator
        self._reported = b""  # digest
        self.is_cached = False

    @functools.cached_property
    def items(self) -> Sequence[WriteItem]:
        assert self._share is not None, "take() comes first"
        return self._share.items

    @collection_paused()
    def propose(self, group: str, rank: int) -> bytes:
        planner, options, state = self._planner, self._options, self._state
        assert state is not None, "the state was released"
        self._group, self._rank = group, rank
        if options.cache and options.flatten and state.fingerprint is not None:
            self._looks = (group, state.fingerprint, state.staged.owned())
            with planner.lock:
                self._found = planner.of_rank.find(self._looks)
        self.is_cached = self._found is not None
        local = self._found.known.plan if self._found is not None else self._planned()
        with planner.lock:
            planner.of_rank.begin(group)
            agreed, offer = planner.of_rank.offer(group, local)
        if self._found is not None:
            self._found.known = agreed or self._found.known
            self._known = self._found.known
        else:
            self._known = agreed or KnownPlan(local)
        return offer.encode()

    @collection_paused()
    def assign(self, proposals: Sequence[bytes]) -> Sequence[bytes]:
        options, planner = self._options, self._planner
        offers = list(map(Offer.decode, proposals))
        with planner.lock:
            answers, self._global_plan = planner.of_coordinator.plan(
                self._group,
                offers,
                lambda plans: assign_shares(plans, options),
                (options.split, options.to_lowest_rank),
            )
        return [answer.encode() for answer in answers]

    @collection_paused()
    def take(self, answer: bytes) -> None:
        assert self._known is not None, "propose() comes first"
        options, planner, decoded = self._options, self._planner, Answer.decode(answer)
        self._plan_name = decoded.global_plan
        with planner.lock:
            self._share = self._known.take(decoded)
            if self._found is None and self._looks is not None:
                self._found = self._learn(self._looks, self._known)
            planner.of_rank.finish(self._group, self._known if options.cache else None)

    def refused(self) -> None:
        with self._planner.lock:
            self._planner.of_rank.finish(self._group, None)

    @collection_paused()
    def prepared(self) -> Prepared | None:
        if self._found is None or not self._staged.is_plain():
            return None
        assert self._share is not None
        return self._found.prepare(self._share, self._rank)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is not WriteItemType.BYTE_IO:
            return self._flatten().tensor(write_item)
        return io.BytesIO(self._planner.serializer.serialize(self._object(write_item.index)))

    def sample(self, attempt: Attempt) -> bytes:
        share = self._share
        if share is None or not len(share.final.shared):
            return b""
        held, _keep = self._replicas(share)
        return sample(share.final, held, attempt.incarnation ^ attempt.sequence, self._words(share))

    def release(self) -> None:
        self._state = self._flat = None
        self._root = {}

    def report(self, attempt: Attempt, job: WriteJob, samples: bytes) -> bytes:
        share = self._share
        assert share is not None
        report = job.report or report_of(job.layouts, job.sealed, len(share.final.items))
        is_known = share.reported.get(self._plan_name) == report.digest
        self._reported = share.sent = report.digest
        if not is_known:
            share.reported = {}
        return RankReport(report.digest, None if is_known else report.encode(), samples).encode()

    def ended(self, committed: bool) -> None:
        # Once the save is committed, the coordinator has this rank's report. After a failure that is unknown.
        share = self._share
        if share is not None and self._reported:
            known = committed and share.sent == self._reported
            share.reported = {self._plan_name: self._reported} if known else {}

    def compose(self, metrics: Mapping[str, float]) -> Compose | None:
        return None if self._global_plan is None else self._global_plan.compose(metrics)

    # ---- within ------------------------------------------------------------------------------------

    @property
    def _staged(self) -> StagedState:
        assert self._state is not None, "the state was released"
        return self._state.staged

    def _planned(self) -> LocalPlan:
        flat = self._flatten()
        items = self._staged.as_captured(flat.items())
        assert self._state is not None
        paths = self._state.paths_of(flat.mappings)
        return LocalPlan.of(declared(items, flat.values, self._staged), paths)

    def _learn(self, looks: Looks, known: KnownPlan) -> Leaves | None:
        state, mappings = self._state, self._flatten().mappings
        assert state is not None
        if state.staged.fingerprint() != state.fingerprint:
            return None  # a tensor was replaced after the call: this is the plan of another state
        leaves = Leaves.of(known, state.staged, self._root, mappings or {})
        if leaves is not None:
            self._planner.of_rank.learn(looks, leaves)
        return leaves

    def _flatten(self) -> FlatState:
        """The state as DCP flattens it."""
        if self._flat is None:
            assert self._state is not None
            self._root = self._state.build()
            self._flat = FlatState(
                self._root,
                flatten=self._options.flatten,
                flatten_shards=self._options.flatten_shards,
                is_coordinator=self._rank == 0,
            )
        return self._flat

    def _object(self, index: MetadataIndex) -> Any:
        if self._found is not None and self._flat is None and index.fqn in self._found.paths:
            return self._found.object(self._staged, index.fqn)
        return self._flatten().object(index)

    def _words(self, share: Share) -> dict[int, int | None]:
        """Digests of the objects among the shared items, by position. If another rank writes one of which this rank has
        nothing, nothing is lost.
        """
        assert self._known is not None
        plan, shared = self._known.plan, share.final.shared
        at = np.flatnonzero(plan.kinds[shared] == OBJECT)
        mine = set(share.final.items.tolist())
        words: dict[int, int | None] = {}
        for position, item in zip(at.tolist(), shared[at].tolist(), strict=True):
            value = self._object(MetadataIndex(plan.names[item]))
            words[position] = None if item not in mine and is_nothing(value) else word_of(value)
        return words

    def _replicas(self, share: Share) -> tuple[Held, list[Any]]:
        assert self._known is not None
        if self._found is not None and self._flat is None and self._staged.is_plain():
            return self._found.held(self._staged, share.final.shared), []
        items = self._known.plan.whole_items(share.final.shared)
        tensors = list(map(self._on_host, items))
        addresses = np.array([0 if each is None else each.data_ptr() for each in tensors], np.int64)
        sizes = np.array([0 if each is None else each.nbytes for each in tensors], np.int64)
        return Held(addresses, sizes), tensors

    def _on_host(self, item: WriteItem) -> torch.Tensor | None:
        """An item's tensor, contiguous and with the bytes as stored; None if the host cannot read it."""
        if item.tensor_data is None:
            return None
        tensor = local_tensor(self._flatten().tensor(item)).detach()
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
        return tensor.resolve_conj().resolve_neg().contiguous()


def assign_shares(
    plans: Sequence[LocalPlan], options: PlanOptions
) -> tuple[list[RankPlan], Catalog]:
    """Every rank's share of what the ranks hold. ValueError: the plans do not fit together."""
    shares, catalog = assign(
        plans,
        split=options.split and not options.to_lowest_rank,
        dedup_to_lowest_rank=options.to_lowest_rank,
    )
    if errors := validate(catalog, filled=len(plans) > 1):
        summary = "; ".join(errors)
        if len(summary) > _SHOWN_ERRORS:
            summary = f"{summary[:_SHOWN_ERRORS]}... (truncated)"
        raise ValueError(f"Failed to validate global plan: {summary}")
    if catalog.mappings is not None and any(p.mappings is not plans[0].mappings for p in plans):
        _refuse_values_within_values(catalog.mappings)
    return shares, catalog


def _refuse_values_within_values(mappings: Mapping[str, tuple[Any, ...]]) -> None:
    """ValueError: one rank's value is another's dict. After validation, which says more of shards of wrappers."""
    within = {path[:end] for path in mappings.values() for end in range(1, len(path))}
    for name, path in mappings.items():
        if path in within:
            raise ValueError(
                f"ranks do not agree on {name!r}: on one it is a value, on another a dict, a list or a wrapper "
                f"subclass of several values"
            )
