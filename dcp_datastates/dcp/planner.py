"""The save planner: it splits replicas by bytes, and caches plans.

With this package's writer, if a state has the structure of an earlier one, the ranks exchange digests in place of
plans, and DCP's broadcast carries a few bytes: see ``planning/``. With any other writer, the planner plans the same
chunks, and the ranks exchange full plans and metadata, as with DCP's default planner.
"""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_datastates.dcp.local_chunks import LocalChunks
from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.chunk_table import Catalog
from dcp_datastates.format.fields import plans_in_objects
from dcp_datastates.format.metadata_objects import catalog_metadata
from dcp_datastates.format.validate import validate
from dcp_datastates.io.tensor_memory import check_storable, local_tensor
from dcp_datastates.io.wrappers import opened
from dcp_datastates.planning.balance import assign
from dcp_datastates.planning.declared import declared
from dcp_datastates.planning.exchange import Answer, Offer, Session, SessionMeta
from dcp_datastates.planning.local_plan import LocalPlan
from dcp_datastates.planning.plan_cache import PlanCache, PlannedMetadata
from dcp_datastates.planning.prepared_write import Prepared
from dcp_datastates.planning.rank_plan import RankPlan
from dcp_datastates.planning.rank_plan_cache import (
    Foreseen,
    KnownPlan,
    Leaves,
    RankPlanCache,
    Share,
)
from dcp_datastates.planning.replicas import Held
from dcp_datastates.planning.serializer import Serializer

__all__ = ["DataStatesSavePlanner", "is_unchanged"]

logger = logging.getLogger(__name__)

_SHOWN_ERRORS: Final = 500


class DataStatesSavePlanner(DefaultSavePlanner):
    """A save planner for large jobs. It takes the options of :class:`DefaultSavePlanner`, and works with any writer.

    Use one planner for all saves of a job, because each planner has its own plan cache. The cache holds several plans,
    so state dicts may alternate (model, optimizer).

    Args:
        flatten_state_dict: As in DCP.
        flatten_sharded_tensors: As in DCP.
        dedup_replicated_tensors: Deprecated in DCP, without effect.
        dedup_save_to_lowest_rank: The lowest rank writes a value that several ranks hold; replicas are not split.
        enable_plan_caching: Cache plans: if no rank's state has changed in structure, no plan is made, gathered or
            broadcast again. Only with this package's writer.
        split_replicas: Split tensors that several ranks hold into slices of rows, so that these ranks write equal
            numbers of bytes within 1 %. Slices are ordinary DCP chunks. Only tensors that are declared equal are split:
            DTensors, and tensors that an optimizer owns. If replicas differ, the save fails
            (:class:`ReplicasDifferError`).

    Threads: only one save at a time may plan with it, as with any DCP planner.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = True,
        *,
        split_replicas: bool = True,
    ) -> None:
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_replicated_tensors=dedup_replicated_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )
        self._caches = enable_plan_caching
        self._split = split_replicas
        self._plan_cache = PlanCache(self._assign)
        self._rank_plan_cache = RankPlanCache(by_owner=split_replicas)
        self._serializer = Serializer()
        # State of the save that is being planned:
        self._session: Session | None = None
        self._found: Leaves | None = None
        self._known: KnownPlan | None = None
        self._share: Share | None = None
        self._chunks: LocalChunks | None = None
        self._flat = False
        # Whether the save does not involve the group's other ranks (no_dist):
        self._solo = False

    # ---- in the order of DCP's calls ------------------------------------------------------------

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        session = storage_meta.session if isinstance(storage_meta, SessionMeta) else None
        if session is not None:
            session.take(self)
        if session is not None and not is_unchanged(self):
            # A hook may change the state or the plan. If the hook was set after async_save was called, build the state
            # now.
            if session.state is not None:
                state_dict = session.state()
            session = None
        self._session = session
        self._found = self._known = self._share = self._chunks = None
        self._flat = self._solo = False
        self.is_coordinator = is_coordinator
        if session is None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self._flat = True
            return
        # Without flattening, a nested dict is one object, which contains its tensors. So wrappers are refused then.
        # A staged state has parts in place of wrappers already.
        opens = session.state is None and self.flatten_state_dict
        self._given = opened(state_dict) if opens else state_dict
        if self._caches and self.flatten_state_dict:
            self._found = self._rank_plan_cache.find(session)
        if self._found is None:
            self._flatten()

    def create_local_plan(self) -> SavePlan:
        session = self._session
        if session is None:
            plan: SavePlan = super().create_local_plan()
            self.plan = dataclasses.replace(plan, items=self._declared(plan.items))
            return self.plan
        self._rank_plan_cache.begin(session.group)
        if self._found is not None:
            agreed, offer = self._rank_plan_cache.offer(self._found.known.plan)
            self._known = self._found.known = agreed or self._found.known
        else:
            items = self._planned().items
            if session.staged is not None:
                items = session.staged.as_captured(items)
            items = self._declared(items)
            local = LocalPlan.of(items, self.mappings if self.flatten_state_dict else None)
            agreed, offer = self._rank_plan_cache.offer(local)
            self._known = agreed or KnownPlan(local)
        return SavePlan([], planner_data=offer)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        offers = [plan.planner_data for plan in all_plans]
        if self._session is not None and all(isinstance(offer, Offer) for offer in offers):
            answers, global_plan = self._plan_cache.plan(
                self._session.group,
                offers,
                self._own,
                (self._split, self.dedup_save_to_lowest_rank),
            )
            self._solo = len(all_plans) < self._session.world
            self.metadata = PlannedMetadata(global_plan)
            self.global_plan = [SavePlan([], planner_data=answer) for answer in answers]
            return self.global_plan, self.metadata
        if any(isinstance(offer, Offer) for offer in offers):
            raise DataStatesError(
                "some ranks plan with a DataStatesSavePlanner for a DataStatesWriter, and some do not: pass planners "
                "and writers of one class on all ranks, with the same hooks set on them"
            )
        if new := plans_in_objects():
            _say_slower(new)
            found: tuple[list[SavePlan], Metadata] = super().create_global_plan(all_plans)
            return found
        mappings = self.flatten_state_dict
        locals_ = [
            LocalPlan.of(plan.items, plan.planner_data if mappings else None) for plan in all_plans
        ]
        shares, catalog = self._assign(locals_)
        self.global_plan = [
            dataclasses.replace(plan, items=share.write_items(local))
            for plan, share, local in zip(all_plans, shares, locals_, strict=True)
        ]
        self.metadata = catalog_metadata(catalog)
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        answer = new_plan.planner_data
        if self._session is None or not isinstance(answer, Answer):
            self.plan = new_plan
            return new_plan
        known = self._known
        assert known is not None, "create_local_plan() comes first"
        share = self._share = known.take(answer)
        if self._caches and not self._solo:
            if self._found is None and self.flatten_state_dict:
                self._rank_plan_cache.learn(self._session, known, self._given, self.mappings)
            self._rank_plan_cache.finish(known)
        else:
            self._rank_plan_cache.finish(None)
        self.plan = dataclasses.replace(share.plan, storage_data=new_plan.storage_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The live tensor of ``write_item``, or the slice that it names; the serialized bytes of an object."""
        if write_item.type == WriteItemType.BYTE_IO:
            found: io.BytesIO = self.transform_object(
                write_item, self.lookup_object(write_item.index)
            )
            return found
        self._flatten()
        assert write_item.tensor_data is not None
        if self._chunks is None:
            self._chunks = LocalChunks(self.state_dict, self.is_coordinator)
        tensor = self._chunks.tensor(write_item.index.fqn, write_item.tensor_data.chunk)
        resolved: torch.Tensor = self.transform_object(write_item, tensor)
        return resolved

    def lookup_object(self, index: Any) -> Any:
        """The object at ``index`` in the state."""
        if self._found is not None and not self._flat and self._session is not None:
            staged = self._session.staged
            if staged is not None and index.fqn in self._found.paths:
                return self._found.object(staged, index.fqn)
        self._flatten()
        return self.state_dict[index.fqn] if index.offset is None else super().lookup_object(index)

    # ---- for this package's writer: see SharesPlanner --------------------------------------------

    def share_of(self, session: Session) -> Share | None:
        return self._share if self._session is session else None

    def foresee(self, session: Session) -> Foreseen | None:
        return (
            self._rank_plan_cache.foresee(session, self._serializer.serialize)
            if self._caches
            else None
        )

    def prepare(self, share: Share, rank: int) -> Prepared | None:
        return None if self._found is None or self._flat else self._found.prepare(share, rank)

    def replicas(self, share: Share) -> tuple[Held, list[Any]]:
        assert self._known is not None
        found, session = self._found, self._session
        staged = None if session is None else session.staged
        if found is not None and staged is not None and not self._flat and staged.is_plain():
            return found.held(staged, share.final.shared), []
        items = self._known.plan.whole_items(share.final.shared)
        tensors = list(map(self._on_host, items))
        addresses = np.array([0 if each is None else each.data_ptr() for each in tensors], np.int64)
        sizes = np.array([0 if each is None else each.nbytes for each in tensors], np.int64)
        return Held(addresses, sizes), tensors

    def release(self, session: Session) -> None:
        session.close()
        if self._session is session:
            self._given = self.state_dict = {}
            self._chunks = None

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        """A hook, as in DCP: serializes objects, and returns tensors unchanged."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._serializer.serialize(object))
        return object

    # ---- within ------------------------------------------------------------------------------------

    def _assign(self, locals_: Sequence[LocalPlan]) -> tuple[list[RankPlan], Catalog]:
        shares, catalog = assign(
            locals_,
            split=self._split and not self.dedup_save_to_lowest_rank,
            dedup_to_lowest_rank=self.dedup_save_to_lowest_rank,
        )
        if errors := validate(catalog, filled=len(locals_) > 1):
            summary = "; ".join(errors)
            if len(summary) > _SHOWN_ERRORS:
                summary = f"{summary[:_SHOWN_ERRORS]}... (truncated)"
            raise ValueError(f"Failed to validate global plan: {summary}")
        return shares, catalog

    def _on_host(self, item: WriteItem) -> torch.Tensor | None:
        """An item's tensor, contiguous and with the bytes as stored; None if the host cannot read it."""
        resolved = self.resolve_data(item)
        assert isinstance(resolved, torch.Tensor)
        tensor = local_tensor(resolved).detach()
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
        return tensor.resolve_conj().resolve_neg().contiguous()

    def _declared(self, items: list[WriteItem]) -> list[WriteItem]:
        staged = None if self._session is None else self._session.staged
        return declared(items, self.state_dict, staged) if self._split else items

    def _planned(self) -> SavePlan:
        try:
            return create_default_local_save_plan(self.state_dict, self.is_coordinator)
        except (RuntimeError, TypeError, ValueError):  # it does not name the tensor
            for name, value in self.state_dict.items():
                if isinstance(value, torch.Tensor):
                    check_storable(local_tensor(value), name)
            raise

    def _own(self, digest: bytes) -> LocalPlan | None:
        known = self._known
        return known.plan if known is not None and known.plan.digest == digest else None

    def _flatten(self) -> None:
        """Flatten the state as DCP does. From then on the staged state is not used any more."""
        if self._flat:
            return
        self._flat = True
        if self._session is not None and self._session.state is not None:
            self._given = self._session.state()
        super().set_up_planner(self._given, None, self.is_coordinator)


_OWN_HOOKS: Final = {
    name: getattr(DataStatesSavePlanner, name)
    for name in (
        "set_up_planner",
        "create_local_plan",
        "create_global_plan",
        "finish_plan",
        "resolve_data",
        "lookup_object",
        "transform_object",
    )
}


def is_unchanged(planner: SavePlanner) -> bool:
    """Whether this module alone determines the plan: ``planner`` is a :class:`DataStatesSavePlanner`, no subclass,
    class attribute or instance attribute overrides a hook, and torch's plans have only fields that this package can put
    in columns. (An overridden hook may read the state, and plan another.)
    """
    kind, own = type(planner), vars(planner)
    return (
        isinstance(planner, DataStatesSavePlanner)
        and not plans_in_objects()
        and all(
            name not in own and getattr(kind, name) is hook for name, hook in _OWN_HOOKS.items()
        )
    )


@cache
def _say_slower(new: tuple[str, ...]) -> None:
    """Warn, once per process, on the coordinator."""
    logger.warning(
        "torch %s has fields in DCP's dataclasses that this release does not know (%s): DCP plans each save anew, "
        "which is slower, and tensors that all ranks hold are not shared out. Look for a newer dcp_datastates",
        torch.__version__,
        ", ".join(new),
    )
