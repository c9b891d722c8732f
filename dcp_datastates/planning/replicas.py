"""Whether replicas are equal: every rank samples what it shares with others, and the coordinator compares.

Ranks that write parts of one tensor must hold the same values, or the checkpoint would be a mixture that no rank ever
had. A sample is a few words of each tensor, at places that all ranks choose alike and that change from save to save.
What travels is a digest for each run of tensors, so that a run with a difference can be named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Final

import numpy as np

from dcp_datastates._native import sample_words
from dcp_datastates.errors import ReplicasDifferError
from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.planning.local_plan import LocalPlan
from dcp_datastates.planning.rank_plan import FinalPlan

__all__ = ["Held", "Samples", "sample"]

_RUNS: Final = 32
"""Digests per set of ranks: up to so many tensors are told apart."""

_DIGEST_BYTES: Final = 4
_UNKNOWN: Final = bytes(_DIGEST_BYTES)
_PARTS: Final = 4
"""Places per tensor, one in each quarter: the engine draws its words from one page."""

_SHOWN: Final = 3


@dataclass(frozen=True, eq=False)
class Held:
    """Memory of a share's ``shared`` items, in their order, as they are to be stored."""

    addresses: Ints
    sizes: Ints
    """Bytes; 0 where the host cannot read it."""


def sample(final: FinalPlan, held: Held, seed: int) -> bytes:
    """The digests of this rank's replicas. ``seed`` is the same on all ranks, below 2**64."""
    quarter = held.sizes // _PARTS
    parts = np.arange(_PARTS)
    addresses = held.addresses[:, None] + quarter[:, None] * parts
    sizes = np.repeat(quarter, _PARTS)
    # Memory may have gone since the call: then the save fails as torn, and must not crash here.
    words = np.array(
        sample_words(addresses.ravel().tolist(), sizes.tolist(), seed, guarded=True), np.uint64
    )
    data = words.reshape(-1, _PARTS)
    digests = []
    for begin, end in _runs(final.sets):
        known = bool((held.sizes[begin:end] > 0).all())
        digests.append(_digest(data[begin:end].tobytes()) if known else _UNKNOWN)
    return b"".join(digests)


def _digest(data: bytes) -> bytes:
    digest = blake2b(data, digest_size=_DIGEST_BYTES).digest()
    return digest if digest != _UNKNOWN else b"\1" * _DIGEST_BYTES


def _runs(sets: Ints) -> list[tuple[int, int]]:
    """Begin and end of each run of ``shared`` items: up to ``_RUNS`` for each set."""
    if not len(sets):
        return []
    edges = [0, *(np.flatnonzero(sets[1:] != sets[:-1]) + 1).tolist(), len(sets)]
    runs: list[tuple[int, int]] = []
    for begin, end in pairwise(edges):
        count = min(end - begin, _RUNS)
        runs += pairwise([begin + (end - begin) * cut // count for cut in range(count + 1)])
    return runs


class Samples:
    """The coordinator's comparison, for one global plan."""

    def __init__(self, locals_: Sequence[LocalPlan], shares: Sequence[FinalPlan]) -> None:
        self._locals = locals_
        self._shares = shares
        self._spans = [_spans(share.sets) for share in shares]

    def check(self, samples: Sequence[bytes]) -> None:
        """Raise :class:`ReplicasDifferError` if two ranks hold different replicas; ``samples`` are by rank."""
        seen: dict[int, tuple[int, bytes]] = {}  # by set: a rank, and what it holds
        for rank, (said, spans) in enumerate(zip(samples, self._spans, strict=True)):
            for number, begin, end in spans:
                mine = said[begin:end] or _UNKNOWN * ((end - begin) // _DIGEST_BYTES)
                other, theirs = seen.setdefault(number, (rank, mine))
                if mine != theirs:
                    self._compare(rank, mine, other, theirs, begin)
                    if _UNKNOWN in theirs:
                        seen[number] = rank, mine

    def _compare(self, rank: int, mine: bytes, other: int, theirs: bytes, begin: int) -> None:
        share = self._shares[rank]
        runs = _runs(share.sets)[begin // _DIGEST_BYTES :]
        differ = []
        for place, run in zip(range(0, len(mine), _DIGEST_BYTES), runs, strict=False):
            pair = {each[place : place + _DIGEST_BYTES] for each in (mine, theirs)}
            if len(pair) > 1 and _UNKNOWN not in pair:
                differ.append(run)
        if not differ:
            return
        names = self._locals[rank].names
        shown = "; ".join(
            _named([names[item] for item in share.shared[slice(*run)]]) for run in differ[:_SHOWN]
        )
        more = f"; and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        raise ReplicasDifferError(
            f"rank {other} and rank {rank} hold different values of {shown}{more}. Each would write a part of them, "
            f"as of replicas that are equal, and what is stored would be a mixture. Broadcast the values, give "
            f"each rank's tensor a name of its own, or use DataStatesSavePlanner(split_replicas=False)"
        )


def _named(names: Sequence[str]) -> str:
    if len(names) == 1:
        return repr(names[0])
    return f"one of {len(names)} tensors from {names[0]!r} to {names[-1]!r}"


def _spans(sets: Ints) -> list[tuple[int, int, int]]:
    """Of each set that a rank is in: its number, and where its digests begin and end among the rank's (bytes)."""
    spans: list[tuple[int, int, int]] = []
    for place, (begin, _) in enumerate(_runs(sets)):
        number, at = int(sets[begin]), place * _DIGEST_BYTES
        if spans and spans[-1][0] == number:
            at = spans.pop()[1]
        spans.append((number, at, (place + 1) * _DIGEST_BYTES))
    return spans
