"""Planning in columns, with a cache: what ``DataStatesSavePlanner`` does for this package's pipeline.

If a state has the structure of an earlier one, it is not flattened, and the ranks exchange digests in place of plans.
"""

from __future__ import annotations

import functools
import io
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_datastates.errors import ConfigurationError, DataStatesError
from dcp_datastates.format.metadata_check import validate
from dcp_datastates.format.metadata_table import Catalog, Compared
from dcp_datastates.io.tensor_memory import local_tensor
from dcp_datastates.planning.balance import assign
from dcp_datastates.planning.comparison import Sums, Turn, in_turn
from dcp_datastates.planning.flat_state import FlatState, declared
from dcp_datastates.planning.messages import (
    OBJECT,
    Answer,
    LocalPlan,
    Offer,
    RankPlan,
    RankReport,
    Report,
)
from dcp_datastates.planning.part_files import KnownState, PartFiles
from dcp_datastates.planning.plan_cache import Agreed, PlanCache, StateKey
from dcp_datastates.planning.samples import Held, is_nothing, sample, word_of
from dcp_datastates.planning.save_planning import SavePlanning, Told, Written
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.staging.staged_state import StagedState
from dcp_datastates.storage.attempt import Attempt

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


@dataclass(frozen=True, eq=False)
class StateToPlan:
    """A state at the call."""

    staged: StagedState
    build: Callable[[], dict[Any, Any]]
    """Builds the state with all its tensors. Called once at most."""
    paths: Paths | None = None
    """The path of each key of the state, if DCP's planner has flattened it already."""

    @functools.cached_property
    def built(self) -> dict[Any, Any]:
        return self.build()

    def plan(self, flat: FlatState) -> LocalPlan:
        """The plan of this state, flattened."""
        items = self.staged.as_captured(flat.items())
        paths = flat.mappings
        if paths is not None and self.paths is not None:  # those in the program's state
            outer = self.paths
            paths = {
                name: (*outer.get(path[0], path[:1]), *path[1:]) for name, path in paths.items()
            }
        columns = self.staged.traversal.columns
        owned = {columns.name(at) for at, is_owned in enumerate(self.staged.owned()) if is_owned}
        return LocalPlan.of(declared(items, owned), paths)

    def known_by(self, plan: LocalPlan, flat: FlatState) -> KnownState | None:
        """Where the plan's items are in states like this one; None if that is unknown."""
        if self.staged.fingerprint() != self.staged.at_call:
            return None  # a tensor was replaced after the call: this is the plan of another state
        return KnownState.of(plan, self.staged, self.built, flat.mappings or {})


class ColumnPlanning(SavePlanning):
    """Planning of one save in columns, with the plans in ``cache``."""

    kind = "in columns"
    can_compare = True

    # Set by propose():
    _group: str
    _rank: int
    _plan: LocalPlan
    _agreed: Agreed
    # Set by take():
    _share: RankPlan

    def __init__(self, cache: PlanCache, options: PlanOptions, state: StateToPlan) -> None:
        self._cache = cache
        self._options = options
        self._state: StateToPlan | None = state
        self._flattened: FlatState | None = None
        self._key: StateKey | None = None  # of the state, if its plan is cached
        self._samples = b""
        self._reported = b""  # digest of this rank's report that the coordinator has
        self._known: KnownState | None = None  # by which the state need not be flattened
        self._composing: Callable[..., bytes] | None = None
        self._turn: Turn | None = None
        self._compare: Callable[..., Compared] | None = None  # the coordinator's

    @collection_paused()
    def propose(self, group: str, rank: int) -> bytes:
        self._group, self._rank = group, rank
        state = self._to_plan
        fingerprint = state.staged.at_call
        if self._options.cache and self._options.flatten and fingerprint is not None:
            self._key = (group, rank, fingerprint, state.staged.owned())
            self._known = self._cache.states.get(self._key)
        self.is_cached = self._known is not None
        plan = state.plan(self._flat()) if self._known is None else self._known.plan
        self._plan, self._agreed = plan, self._cache.begin(group)
        share = self._agreed.get(plan.digest)
        if share is None:
            return Offer(plan.digest, b"", plan.encoded).encode()
        return Offer(plan.digest, share.digest).encode()

    @collection_paused()
    def assign(self, proposals: Sequence[bytes]) -> Sequence[bytes]:
        options, offers = self._options, list(map(Offer.decode, proposals))
        plan = self._cache.plan(
            self._group,
            offers,
            lambda plans: assign_shares(plans, options),
            (options.split, options.to_lowest_rank),
        )
        reports = plan.reports
        self._composing = functools.partial(plan.compose, reports)
        turn = None
        if self.compare_replicas:
            if options.to_lowest_rank:
                raise ConfigurationError(
                    "compare_replicas compares what several ranks write, and dedup_save_to_lowest_rank has one write "
                    "all: leave one of the two out"
                )
            history = plan.comparison.history(self.compare_replicas)
            turn = history.choose()
            self._compare = functools.partial(plan.comparison.check, turn, history)
        answers = plan.answers([offer.share for offer in offers], reports, turn)
        return [answer.encode() for answer in answers]

    @collection_paused()
    def take(self, answer: bytes) -> None:
        decoded, plan = Answer.decode(answer), self._plan
        share = RankPlan.decode(decoded.data) if decoded.data else self._agreed.get(plan.digest)
        if share is None or share.digest != decoded.digest:
            raise DataStatesError("the coordinator answers with a share that this rank has not")
        if self._known is None and self._key is not None:
            self._known = self._to_plan.known_by(plan, self._flat())
            if self._known is not None:
                self._cache.states.put(self._key, self._known)
        self._agreed.put(plan.digest, share)
        if self._options.cache:
            self._cache.end(self._group, self._agreed)
        self._share, self._reported = share, decoded.report
        self._turn = None if decoded.turn is None else Turn(*decoded.turn)

    def left_out(self) -> None:
        self._cache.end(self._group, self._agreed)

    @collection_paused()
    def files(self, rank: int) -> PartFiles:
        if self._known is not None and self._to_plan.staged.is_plain():
            return self._known.files(self._share, rank)
        return PartFiles.of(self._share.write_items(self._plan), rank)

    @collection_paused()
    def compared(self) -> Mapping[int, PartFiles]:
        if self._turn is None:
            return {}
        if self._known is not None and self._to_plan.staged.is_plain():
            return self._known.compared(self._share, self._turn, self._rank)
        parts = in_turn(self._plan, self._share, self._turn).items()
        return {number: PartFiles.of(part.write_items(self._plan), 0) for number, part in parts}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is not WriteItemType.BYTE_IO:
            return self._flat().tensor(write_item)
        return io.BytesIO(serialize(self._object(write_item.index)))

    def sample(self, attempt: Attempt) -> None:
        if len(self._share.sampled[0]):
            held, _keep = self._replicas()
            seed = attempt.incarnation ^ attempt.sequence
            self._samples = sample(self._share, held, seed, self._words())

    def release(self) -> None:
        self._state = self._flattened = None

    def report(self, places: Report, written: Written) -> Told:
        data = b"" if places.digest == self._reported else places.encoded
        samples, turn, composing = self._samples, self._turn, self._composing

        def report() -> bytes:
            sums = b"" if turn is None else Sums.of(written.checksums()).encode()
            return RankReport(places.digest, samples, data, sums).encode()

        if composing is None:
            return report, None
        compare = self._compare and functools.partial(self._compare, save=written.save)
        return report, functools.partial(composing, written.metrics, compare=compare)

    # ---- within ------------------------------------------------------------------------------------

    @property
    def _to_plan(self) -> StateToPlan:
        assert self._state is not None, "the state was released"
        return self._state

    def _flat(self) -> FlatState:
        """The state as DCP flattens it."""
        if self._flattened is None:
            self._flattened = FlatState(
                self._to_plan.built,
                flatten=self._options.flatten,
                flatten_shards=self._options.flatten_shards,
                is_coordinator=self._rank == 0,
            )
        return self._flattened

    def _object(self, index: MetadataIndex) -> Any:
        path = None if self._known is None else self._known.paths.get(index.fqn)
        if path is None:
            return self._flat().object(index)
        return functools.reduce(operator.getitem, path, self._to_plan.staged.root)

    def _words(self) -> dict[int, int | None]:
        """Digests of the objects among the sampled items, by position. If another rank writes one of which this rank
        has nothing, nothing is lost.
        """
        head, share = self._plan.head, self._share
        sampled, _ = share.sampled
        at = np.flatnonzero(head.kinds[sampled] == OBJECT)
        mine = set(share.items.tolist())
        words: dict[int, int | None] = {}
        for position, item in zip(at.tolist(), sampled[at].tolist(), strict=True):
            value = self._object(MetadataIndex(head.names[item]))
            words[position] = None if item not in mine and is_nothing(value) else word_of(value)
        return words

    def _replicas(self) -> tuple[Held, list[Any]]:
        known, (sampled, _), staged = self._known, self._share.sampled, self._to_plan.staged
        if known is not None and staged.is_plain():
            return known.held(staged, sampled), []
        tensors = list(map(self._on_host, self._plan.whole_items(sampled)))
        addresses = np.array([0 if each is None else each.data_ptr() for each in tensors], np.int64)
        sizes = np.array([0 if each is None else each.nbytes for each in tensors], np.int64)
        return Held(addresses, sizes), tensors

    def _on_host(self, item: WriteItem) -> torch.Tensor | None:
        """An item's tensor, contiguous and with the bytes as stored; None if the host cannot read it."""
        if item.tensor_data is None:
            return None
        tensor = local_tensor(self._flat().tensor(item)).detach()
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
    if catalog.mappings is not None and any(p.head is not plans[0].head for p in plans):
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


_SHORT: Final = 256
"""Longest string (characters) and number (bits) whose bytes are kept."""


def serialize(value: Any) -> bytes:
    """``value`` as ``torch.save`` writes it. Any thread may call this."""
    return _kept(value) if _recurs(value) else _saved(value)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


_kept = functools.lru_cache(maxsize=4096, typed=True)(_saved)


def _recurs(value: Any) -> bool:
    """Whether it is likely to recur, and equal to no value of its type with other bytes."""
    kind = type(value)
    if kind is float:
        return not math.isnan(value) and repr(value) != "-0.0"
    if kind is str:
        return len(value) <= _SHORT
    if kind is int:
        return bool(value.bit_length() <= _SHORT)
    return value is None or kind is bool
