"""Comparison: whether replicas are equal, byte for byte, a part of them at each save.

A save with ``compare_replicas=n`` has each rank read one n-th of what it holds in common with other ranks, and sum it
as the engine sums files: one CRC32C per MiB of *streams*, in which the tensors lie as in files, and which are not
written. Equal replicas have equal sums. The coordinator chooses the part, which is another one at the next save of
the same plan, and compares the sums that come with the votes. A replica that differs stays so, as an optimizer changes
all of them alike: what is equal now was equal at the saves before, since they were last loaded.
"""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np

from dcp_datastates._native import BLOCK_BYTES, crc32c
from dcp_datastates.errors import ReplicasDifferError
from dcp_datastates.format.layout import lay_out
from dcp_datastates.format.metadata_table import Compared
from dcp_datastates.format.ragged import Ints, distinct
from dcp_datastates.planning.balance import cut_line
from dcp_datastates.planning.messages import OBJECT, LocalPlan, RankPlan, Why, extents_of
from dcp_datastates.planning.packing import Message
from dcp_datastates.planning.samples import say

_MOST_DIGESTS: Final = 256
"""Of one set of ranks: a difference is known to a MiB up to as many, and to a 256th of more."""
_DIGEST_BYTES: Final = 4
_SHOWN: Final = 20
_NONE: Final = np.zeros(0, np.int64)


class Turn(NamedTuple):
    """The part that is compared: ``number`` of ``of``."""

    number: int
    of: int


def in_turn(plan: LocalPlan, share: RankPlan, turn: Turn) -> dict[int, RankPlan]:
    """What the rank with this share compares, for each set of ranks, as a share of the plan. The ranks of a set have
    the same tensors and rows in it, in the same order.
    """
    parts = {}
    is_tensor = plan.head.kinds[share.shared] != OBJECT
    for number in distinct(share.sets[is_tensor]):
        items = share.shared[is_tensor & (share.sets == number)]
        items = items[plan.nbytes(items) > 0]
        rows = extents_of(plan.head.ndims, plan.sizes)[items]
        nbytes = plan.nbytes(items)
        quota = np.full(turn.of, nbytes.sum() // turn.of)
        piece, of_turn, begin, end = cut_line(rows, nbytes // rows, quota)
        mine = of_turn == turn.number
        if mine.any():
            its, hints = items[piece[mine]], np.full(int(mine.sum()), -1)
            parts[number] = RankPlan(its, begin[mine], end[mine], hints, _NONE, _NONE)
    return parts


@dataclass(frozen=True, eq=False)
class Sums(Message):
    """What a rank tells of its replicas: digests of the checksums of its streams, for each set of ranks."""

    host: str
    sets: Ints
    digests: tuple[bytes, ...]

    @staticmethod
    def of(checksums: Mapping[int, bytes]) -> Sums:
        """``checksums``: for each set, those of all blocks of its streams, 4 bytes each."""
        digests = tuple(map(_digests, checksums.values()))
        return Sums(socket.gethostname(), np.array(list(checksums), np.int64), digests)


def _digests(checksums: bytes) -> bytes:
    runs = _cut(checksums, _per_digest(len(checksums)))
    return b"".join(crc32c(run).to_bytes(_DIGEST_BYTES, "little") for run in runs)


def _per_digest(nbytes: int) -> int:
    """How many blocks have one digest, if all blocks have ``nbytes`` of checksums."""
    return max(1, -(-nbytes // (_MOST_DIGESTS * _DIGEST_BYTES)))


class History:
    """Which parts of a plan's replicas were found equal since the last load. ``name``: the plan's, in the notes of
    checkpoints, and no other history's of this process.
    """

    def __init__(self, name: str, of: int) -> None:
        self._name = name
        self._numbers = itertools.count(1)
        # When each part was chosen, and when found equal: numbers that grow; 0: never.
        self._chosen, self._equal = [0] * of, [0] * of
        self.saves = [""] * of
        """The save in which each part was last found equal."""

    def choose(self) -> Turn:
        """The part that was found equal the longest ago; of several, the one that was chosen the longest ago."""
        of = len(self._equal)
        part = min(range(of), key=lambda each: (self._equal[each], self._chosen[each]))
        self._chosen[part] = next(self._numbers)
        return Turn(part, of)

    def note(self, turn: Turn, save: str) -> Compared:
        """The part is equal in this save."""
        self._equal[turn.number], self.saves[turn.number] = next(self._numbers), save
        return Compared(*turn, self._name)


_histories: dict[tuple[bytes, int], History] = {}
"""By plan and number of parts, the oldest first. They outlive planners."""
_MOST_HISTORIES: Final = 64
_serials = itertools.count()


def forget_histories() -> None:
    """State is loaded, which may make replicas equal that were not. Saves in flight keep theirs."""
    _histories.clear()


class Comparison:
    """Compares the ranks' replicas for one global plan, on the coordinator."""

    def __init__(self, locals_: Sequence[LocalPlan], shares: Sequence[RankPlan]) -> None:
        self._locals, self._shares = locals_, shares

    def history(self, of: int) -> History:
        """What is known of ``of`` parts; of one part, if the ranks hold no tensors alike."""
        key = self._plan, of if self._has_replicas else 1
        history = _histories.get(key)  # a load in another thread may clear them at any time
        if history is None:
            if len(_histories) >= _MOST_HISTORIES:
                _histories.pop(next(iter(_histories), key), None)
            history = _histories[key] = History(f"{self._plan.hex()}.{next(_serials)}", key[1])
        return history

    @functools.cached_property
    def _has_replicas(self) -> bool:
        pairs = zip(self._locals, self._shares, strict=True)
        return any(in_turn(plan, share, Turn(0, 1)) for plan, share in pairs)

    @functools.cached_property
    def _plan(self) -> bytes:
        return blake2b(b"".join(each.digest for each in self._locals), digest_size=8).digest()

    def check(self, turn: Turn, history: History, told: Sequence[bytes], save: str) -> Compared:
        """Compare the part of this turn in ``save``; ``told``: each rank's :class:`Sums`.

        Raises :class:`ReplicasDifferError` if two ranks hold different bytes of what is declared equal; what is not is
        named in the log.
        """
        sums = [Sums.decode(each) for each in told]
        by_set: dict[int, dict[int, bytes]] = {}
        for rank, each in enumerate(sums):
            for number, digests in zip(each.sets.tolist(), each.digests, strict=True):
                by_set.setdefault(number, {})[rank] = digests
        for number, by_rank in by_set.items():
            if len(set(by_rank.values())) > 1:
                before = history.saves[turn.number]
                self._tell(turn, number, by_rank, [each.host for each in sums], before)
        return history.note(turn, save)

    def _tell(
        self,
        turn: Turn,
        number: int,
        by_rank: Mapping[int, bytes],
        hosts: Sequence[str],
        before: str,
    ) -> None:
        columns = zip(*map(_cut, by_rank.values()), strict=True)
        differing, column = next(each for each in enumerate(columns) if len(set(each[1])) > 1)
        alike: dict[bytes, list[int]] = {}
        for rank, digest in zip(by_rank, column, strict=True):
            alike.setdefault(digest, []).append(rank)
        groups = sorted(alike.values(), key=len)
        names = self._names(groups[0][0], turn, number, differing)
        if number % len(Why) == Why.UNDECLARED:
            say(names, (groups[-1][0], groups[0][0]))
            return
        who = " and ".join(_ranks(each, hosts) for each in groups)
        since = f"; they were equal in the save to {before}" if before else ""
        raise ReplicasDifferError(
            f"{who} hold different bytes within {names}, which are replicas{since}. Checkpoints that were saved since "
            f'may mix them: latest(root, verify="replicas") is the newest whose replicas are known to be equal. If '
            f"one rank's memory or device is at fault, leave its host out"
        )

    def _names(self, rank: int, turn: Turn, number: int, digest: int) -> str:
        """The tensors in the blocks of a digest, with the bytes of this rank's shard of them."""
        plan = self._locals[rank]
        share = in_turn(plan, self._shares[rank], turn)[number]
        layouts = lay_out(share.layout_items(plan), 0)
        ends = [layout.seal(()).table_offset for layout in layouts]
        blocks = [-(-end // BLOCK_BYTES) for end in ends]
        step = _per_digest(sum(blocks) * _DIGEST_BYTES)
        low, high = digest * step, (digest + 1) * step
        named = []
        for layout, count in zip(layouts, blocks, strict=True):
            begin, end = max(low, 0) * BLOCK_BYTES, min(high, count) * BLOCK_BYTES
            for entry in layout.tensors:
                row = entry.nbytes // entry.sizes[0] if entry.sizes else 0
                first = max(entry.offset, begin) - entry.offset
                last = min(entry.offset + entry.nbytes, end) - entry.offset
                if first < last:
                    within = int(share.begins[entry.item]) * row
                    name = plan.head.names[share.items[entry.item]]
                    named.append(f"{name!r}, bytes {within + first} to {within + last}")
            low, high = low - count, high - count
        more = f"; and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        return f"{'; '.join(named[:_SHOWN])}{more}"


def _cut(digests: bytes, each: int = 1) -> list[bytes]:
    """Pieces of so many digests or checksums."""
    step = each * _DIGEST_BYTES
    return [digests[at : at + step] for at in range(0, len(digests), step)]


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    shown = [f"rank {rank} ({hosts[rank]})" for rank in ranks[:3]]
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"{', '.join(shown)}{more}"
