"""The save planner: replicas are split by bytes, and what was planned once is not planned again.

With this package's writer, a save whose state looks like an earlier one's exchanges digests in place of plans, and
DCP's broadcast carries a few bytes: see ``planning/``. With any other writer it plans the same chunks, and
hands plans and metadata around in full, as DCP's default planner does.
"""

from __future__ import annotations

import dataclasses
import io
import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.chunk_table import Catalog
from dcp_datastates.format.fields import plans_in_objects
from dcp_datastates.format.metadata_objects import catalog_metadata
from dcp_datastates.format.validate import validate
from dcp_datastates.io.devices import HOST
from dcp_datastates.io.shards import holds_shards, shard_with
from dcp_datastates.io.tensor_memory import check_storable, local_tensor
from dcp_datastates.planning.balance import assign
from dcp_datastates.planning.declared import declared
from dcp_datastates.planning.exchange import Answer, Offer, Session, SessionMeta
from dcp_datastates.planning.local_plan import LocalPlan
from dcp_datastates.planning.plan_cache import Coordinator, PlannedMetadata
from dcp_datastates.planning.prepared_write import Prepared
from dcp_datastates.planning.rank_memory import Foreseen, KnownPlan, Leaves, Share
from dcp_datastates.planning.rank_plan import FinalPlan
from dcp_datastates.planning.replicas import Held
from dcp_datastates.staging.fingerprint import Fingerprint

__all__ = ["DataStatesSavePlanner", "is_unchanged"]

logger = logging.getLogger(__name__)

_KEPT_PLANS: Final = 8
"""Local plans that a rank may go back to: several state dicts may be saved in turn."""

_KEPT_SHARES: Final = 4

_SHOWN_ERRORS: Final = 500

_SHORT: Final = 256
"""Characters of a string, and bits of a number, that are likely to come again."""


_Looks = tuple[str, Fingerprint, tuple[bool, ...]]
"""What a local plan is remembered by: the group, what the state looks like, and which of it optimizers own."""


class DataStatesSavePlanner(DefaultSavePlanner):
    """A save planner for large jobs; takes the options of :class:`DefaultSavePlanner`, and works with any writer.

    Use one object for all saves of a job: what it remembers is its own. State dicts that alternate (model,
    optimizer) do not push each other out.

    Args:
        flatten_state_dict: as in DCP.
        flatten_sharded_tensors: as in DCP.
        dedup_replicated_tensors: deprecated in DCP, without effect.
        dedup_save_to_lowest_rank: what several ranks hold is written by the lowest; nothing is split then.
        enable_plan_caching: remember plans, so that a state that looks the same on all ranks is not planned,
            gathered or broadcast again. With this package's writer only.
        split_replicas: cut tensors that several ranks hold into row slices, so that each holder writes the same
            number of bytes within 1 %. They are ordinary DCP chunks. Only what is declared equal is cut: DTensors,
            and what an optimizer owns. Replicas that differ fail the save (:class:`ReplicasDifferError`).

    Threads: one save at a time plans with it, as DCP does it.
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
        self._coordinator = Coordinator(self._assign)
        self._known: dict[str, OrderedDict[bytes, KnownPlan]] = {}  # by group: what was agreed on
        self._leaves: OrderedDict[_Looks, Leaves] = OrderedDict()
        self._serialized: dict[tuple[type, Any], bytes] = {}
        # Of the save that is being planned:
        self._session: Session | None = None
        self._fingerprint: Fingerprint | None = None
        self._found: Leaves | None = None
        self._entry: KnownPlan | None = None
        self._planning: str | None = None  # the group, until the plan is finished
        self._held: dict[str, list[tuple[torch.Size, torch.Size]]] | None = None
        self._share: Share | None = None
        self._flat = False
        self._solo = (
            False  # without the other ranks of its group (no_dist): they know nothing of it
        )

    # ---- in the order of DCP's calls ------------------------------------------------------------

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        session = storage_meta.session if isinstance(storage_meta, SessionMeta) else None
        if session is not None:
            session.taken = True
        if session is not None and not is_unchanged(self):
            # A hook may plan another state, or the same one otherwise. One that was set after async_save was called
            # has the state still to come.
            if session.state is not None:
                state_dict = session.state()
            session = None
        if self._planning is not None:
            # The last save was not planned to the end: who knows what the coordinator has seen of it.
            self._known.pop(self._planning, None)
            self._planning = None
        self._session = session
        self._found = self._entry = self._held = self._share = None
        self._fingerprint = None
        self._flat = self._solo = False
        self.is_coordinator = is_coordinator
        if session is None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self._flat = True
            return
        self._given = state_dict
        # Not flattened, a nested dict is an object, and its tensors belong to it alone.
        if self._caches and self.flatten_state_dict:
            self._fingerprint = session.fingerprint
            if self._fingerprint is not None:
                self._found = self._leaves.get(self._looks_of(session, self._fingerprint))
        if self._found is None:
            self._flatten()

    def create_local_plan(self) -> SavePlan:
        session = self._session
        if session is None:
            plan: SavePlan = super().create_local_plan()
            self.plan = dataclasses.replace(plan, items=self._declared(plan.items))
            return self.plan
        self._planning = session.group
        known = self._known.setdefault(session.group, OrderedDict())
        if self._found is not None:
            digest = self._found.known.plan.digest
            agreed = known.get(digest)
            self._entry = self._found.known = agreed or self._found.known
        else:
            plan = self._planned()
            staged = session.staged
            items = plan.items if staged is None else staged.as_captured(plan.items)
            items = self._declared(items)
            local = LocalPlan.of(items, self.mappings if self.flatten_state_dict else None)
            digest = local.digest
            agreed = known.get(digest) if self._caches else None
            self._entry = agreed or KnownPlan(local)
        if agreed is not None:
            known.move_to_end(digest)
            return SavePlan([], planner_data=Offer(digest, agreed.latest, None))
        keep = tuple(known)[-(_KEPT_PLANS - 1) :]
        for other in [other for other in known if other not in keep]:
            del known[other]
        data = self._entry.plan.encode()
        return SavePlan([], planner_data=Offer(digest, b"", data, keep))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        offers = [plan.planner_data for plan in all_plans]
        if self._session is not None and all(isinstance(offer, Offer) for offer in offers):
            answers, whole = self._coordinator.plan(
                self._session.group,
                offers,
                self._own,
                (self._split, self.dedup_save_to_lowest_rank),
            )
            self._solo = len(all_plans) < self._session.world
            self.metadata = PlannedMetadata(whole)
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
        entry = self._entry
        assert entry is not None, "create_local_plan() comes first"
        share = entry.shares.get(answer.digest)
        if share is None:
            if answer.data is None:
                raise DataStatesError("the coordinator answers with a share that this rank has not")
            final = FinalPlan.decode(answer.data)
            share = Share(final, SavePlan(final.write_items(entry.plan)))
            entry.shares[answer.digest] = share
            while len(entry.shares) > _KEPT_SHARES:
                entry.shares.popitem(last=False)
        share.whole = answer.whole
        entry.latest = answer.digest
        self._share = share
        if self._caches and not self._solo:
            self._known.setdefault(self._session.group, OrderedDict())[entry.plan.digest] = entry
            if self._found is None:
                self._learn(entry)
        self._planning = None
        self.plan = dataclasses.replace(share.plan, storage_data=new_plan.storage_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The live tensor, or the part of it that ``write_item`` names; an object in serialized form."""
        if write_item.type == WriteItemType.BYTE_IO:
            found: io.BytesIO = self.transform_object(
                write_item, self.lookup_object(write_item.index)
            )
            return found
        self._flatten()
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        whole = self.state_dict[write_item.index.fqn]
        if isinstance(whole, ShardedTensor) or holds_shards(whole):
            tensor, begin = _shard_with(whole, chunk.offsets)
        else:
            tensor = whole.to_local() if isinstance(whole, DTensor) else whole
            begin = 0
            if tensor.shape != chunk.sizes and tensor.dim():
                begin = chunk.offsets[0] - self._first_row(write_item.index.fqn, chunk.offsets)
        if tensor.shape != chunk.sizes and tensor.dim() and tensor.numel():
            tensor = tensor.narrow(0, begin, chunk.sizes[0])
        resolved: torch.Tensor = self.transform_object(write_item, tensor)
        return resolved

    def lookup_object(self, index: Any) -> Any:
        """What stands at ``index`` in the state."""
        if self._found is not None and not self._flat and self._session is not None:
            staged = self._session.staged
            if staged is not None and index.fqn in self._found.paths:
                return self._found.object(staged, index.fqn)
        self._flatten()
        return self.state_dict[index.fqn] if index.offset is None else super().lookup_object(index)

    # ---- for this package's writer ---------------------------------------------------------------

    def share_of(self, session: Session) -> Share | None:
        """What to write in the save that ``session`` is; None if this planner has not planned it."""
        return self._share if self._session is session else None

    def foresee(self, session: Session) -> Foreseen | None:
        """What will be written if no rank's state looks otherwise than in the save before.

        Any thread, also while another save is planned.
        """
        staged, key = session.staged, session.fingerprint
        if staged is None or key is None or not self._caches:
            return None
        found = self._leaves.get(self._looks_of(session, key))
        share = None if found is None else found.known.shares.get(found.known.latest)
        if found is None or share is None:
            return None
        prepared = found.prepared.get((session.rank, share.final.digest))
        if prepared is None:
            return None
        items = share.plan.items
        return Foreseen(
            share,
            prepared,
            lambda item: memoryview(self.serialize(found.object(staged, items[item].index.fqn))),
        )

    def prepare(self, share: Share, rank: int) -> Prepared | None:
        """The share's files, to be written from what was staged; None if that cannot be."""
        found = self._found
        if found is None or self._flat:
            return None
        final = share.final
        prepared = found.prepared.get((rank, final.digest))
        if prepared is None:
            if len(found.prepared) >= _KEPT_SHARES:
                found.prepared.clear()
            prepared = found.prepared[rank, final.digest] = Prepared(
                share.plan.items, rank, found.positions[final.items], final.begins.tolist()
            )
        return prepared

    def replicas(self, share: Share) -> tuple[Held, list[Any]]:
        """Where this rank's replicas of what several ranks write are in memory; and what must be kept meanwhile."""
        assert self._entry is not None
        local, items = self._entry.plan, share.final.shared
        found, session = self._found, self._session
        staged = None if session is None else session.staged
        if found is not None and staged is not None and not self._flat and staged.is_plain():
            staged.copying.wait()
            leaves = found.positions[items]
            addresses, _, devices = staged.bases()
            sizes = local.nbytes(items)
            if devices is not None:
                sizes[devices[leaves] != HOST] = 0
            return Held(addresses[leaves], sizes), []
        tensors = list(map(self._on_host, local.whole_items(items)))
        addresses = np.array([0 if each is None else each.data_ptr() for each in tensors], np.int64)
        sizes = np.array([0 if each is None else each.nbytes for each in tensors], np.int64)
        return Held(addresses, sizes), tensors

    def release(self, session: Session) -> None:
        """The save that ``session`` is has been read: hold nothing of its state."""
        session.close()
        if self._session is session:
            self._given = self.state_dict = {}

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        """A hook, as in DCP: objects become their bytes, tensors stay what they are."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.serialize(object))
        return object

    def serialize(self, value: Any) -> bytes:
        """``value`` as ``torch.save`` writes it. Numbers and strings come again and again."""
        key = _key(value)
        if key is not None and (known := self._serialized.get(key)) is not None:
            return known
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = buffer.getvalue()
        if key is not None:
            if len(self._serialized) >= 4096:
                self._serialized.clear()
            self._serialized[key] = data
        return data

    # ---- within ------------------------------------------------------------------------------------

    def _assign(self, locals_: Sequence[LocalPlan]) -> tuple[list[FinalPlan], Catalog]:
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
        """The tensor of an item with the bytes as they are stored, if the host can read them."""
        resolved = self.resolve_data(item)
        assert isinstance(resolved, torch.Tensor)
        tensor = local_tensor(resolved).detach()
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
        return tensor.resolve_conj().resolve_neg().contiguous()

    def _looks_of(self, session: Session, key: Fingerprint) -> _Looks:
        return session.group, key, session.owned if self._split else ()

    def _declared(self, items: list[WriteItem]) -> list[WriteItem]:
        staged = None if self._session is None else self._session.staged
        return declared(items, self.state_dict, staged) if self._split else items

    def _planned(self) -> SavePlan:
        """DCP's plan of the state."""
        try:
            return create_default_local_save_plan(self.state_dict, self.is_coordinator)
        except (RuntimeError, NotImplementedError):  # which do not say which tensor they are about
            for name, value in self.state_dict.items():
                if isinstance(value, torch.Tensor):
                    check_storable(local_tensor(value), name)
            raise

    def _own(self, digest: bytes) -> LocalPlan | None:
        entry = self._entry
        return entry.plan if entry is not None and entry.plan.digest == digest else None

    def _flatten(self) -> None:
        """Have the state as DCP flattens it; with that, the staged is used up."""
        if self._flat:
            return
        self._flat = True
        if self._session is not None and self._session.state is not None:
            self._given = self._session.state()
        super().set_up_planner(self._given, None, self.is_coordinator)

    def _learn(self, entry: KnownPlan) -> None:
        """Note where the items of this plan are in a state that looks like this one."""
        session, key = self._session, self._fingerprint
        if session is None or session.staged is None or key is None:
            return
        columns = session.staged.traversal.columns
        # By name: one tensor may stand in several places, and other tensors in those the next time.
        place = {columns.name(position): position for position in range(len(columns.keys))}
        if len(place) != len(columns.keys):
            return
        local = entry.plan
        positions = np.array(
            [
                place.get(name, -1) if kind else -1
                for name, kind in zip(local.names, local.kinds.tolist(), strict=True)
            ],
            np.int64,
        )
        if (positions[local.kinds > 0] < 0).any():
            return  # not the tensors that were staged
        root = self._given
        paths = {}
        for name, kind in zip(local.names, local.kinds.tolist(), strict=True):
            if kind == 0:
                path = _real_path(root, self.mappings.get(name, (name,)))
                if path is None:
                    return
                paths[name] = path
        self._leaves[self._looks_of(session, key)] = Leaves(entry, positions, paths)
        while len(self._leaves) > _KEPT_PLANS:
            self._leaves.popitem(last=False)

    def _first_row(self, fqn: str, offsets: torch.Size) -> int:
        """Where the chunk begins, in the whole tensor, that this rank holds and that has the row ``offsets[0]``."""
        if self._held is None:
            local = create_default_local_save_plan(self.state_dict, self.is_coordinator)
            self._held = {}
            for item in local.items:
                if item.tensor_data is not None:
                    chunk = item.tensor_data.chunk
                    self._held.setdefault(item.index.fqn, []).append((chunk.offsets, chunk.sizes))
        for starts, sizes in self._held[fqn]:
            if starts[0] <= offsets[0] < starts[0] + sizes[0] and tuple(starts[1:]) == tuple(
                offsets[1:]
            ):
                return int(starts[0])
        raise DataStatesError(f"this rank does not hold row {offsets[0]} of {fqn!r}")


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


def is_unchanged(planner: DataStatesSavePlanner) -> bool:
    """Whether nothing but this module has a say in what is written: no subclass, no hook set on the class or object,
    no torch whose plans this package cannot put in columns.
    """
    kind, own = type(planner), vars(planner)
    return not plans_in_objects() and all(
        name not in own and getattr(kind, name) is hook for name, hook in _OWN_HOOKS.items()
    )


@cache
def _say_slower(new: tuple[str, ...]) -> None:
    """Once in a process, on the coordinator."""
    logger.warning(
        "torch %s has fields in DCP's dataclasses that this release does not know (%s): DCP plans each save anew, "
        "which is slower, and tensors that all ranks hold are not shared out. Look for a newer dcp_datastates",
        torch.__version__,
        ", ".join(new),
    )


def _key(value: Any) -> tuple[type, Any] | None:
    """Equal for values whose bytes are equal; None for one that is not likely to come again."""
    kind = type(value)
    if kind is float:
        return kind, repr(value)  # tells -0.0 from 0.0, and a NaN is equal to itself
    if kind is str:
        return (kind, value) if len(value) <= _SHORT else None
    if kind is int:
        return (kind, value) if value.bit_length() <= _SHORT else None
    return (kind, value) if value is None or kind is bool else None


def _shard_with(
    tensor: ShardedTensor | torch.Tensor, offsets: torch.Size
) -> tuple[torch.Tensor, int]:
    if not isinstance(tensor, ShardedTensor):
        found = shard_with(tensor, offsets)
        if found is not None:
            return found
        raise DataStatesError(f"this rank holds no shard at {tuple(offsets)}")
    for shard in tensor.local_shards():
        starts, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        if tuple(starts) == tuple(offsets):
            return shard.tensor, 0
        if (
            starts
            and tuple(starts[1:]) == tuple(offsets[1:])
            and starts[0] <= offsets[0] < starts[0] + sizes[0]
        ):
            return shard.tensor, int(offsets[0] - starts[0])
    raise DataStatesError(f"this rank holds no shard at {tuple(offsets)}")


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
