"""Samples: whether ranks that hold replicas of one value hold the same.

Ranks that write parts of one tensor must hold the same values; otherwise the checkpoint would be a mixture that no rank
ever had. So every rank samples its replicas, and the coordinator compares the samples. A sample is a few words of each
tensor, at places that are the same on all ranks and change from save to save. Ranks send one digest per run of tensors,
so that an error can name the run.

Where nothing declares the values of one name equal, the lowest of the ranks that hold them writes its own, and what the
others hold is lost. So all compare digests in the vote, and a difference is named. It is no error: programs save a loss
or a time of each rank under one name, and mean the first rank's. Nothing is lost where another rank has None or an
empty container: many programs have a value on the first rank only.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, islice, pairwise
from typing import Any, Final

import numpy as np
import torch

from dcp_datastates._native import sample_words
from dcp_datastates.errors import ReplicasDifferError
from dcp_datastates.format.ragged import Ints
from dcp_datastates.planning.messages import LocalPlan, RankPlan, Why

logger = logging.getLogger(__name__)

_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_MOST_LOOKED_AT: Final = 2048
"""Values in a value: training waits for this."""


def is_nothing(value: Any) -> bool:
    """Whether nothing is lost with it."""
    is_sized = isinstance(value, Collection) and getattr(value, "shape", None) != ()
    return value is None or (is_sized and not len(value))


def word_of(value: Any) -> int:
    """A digest of 64 bits, which is equal on all ranks for equal values. Of large values it covers the beginning."""
    digest = blake2b(digest_size=8)
    with contextlib.suppress(Exception):  # it is stored by a way of its own
        _look(value, digest, [_MOST_LOOKED_AT])
    return int.from_bytes(digest.digest(), "little")


def _look(value: Any, digest: Any, left: list[int]) -> None:
    left[0] -= 1
    if left[0] < 0:
        return
    kind = type(value)
    digest.update(f"{kind.__qualname__}:".encode())
    if kind in _PLAIN:
        digest.update(repr(value).encode("utf-8", "surrogatepass"))
    elif isinstance(value, torch.Tensor):
        digest.update(repr((tuple(value.shape), value.dtype)).encode())
        if type(value) is torch.Tensor and value.is_cpu and value.layout is torch.strided:
            first = value.detach().reshape(-1)[:_MOST_LOOKED_AT].resolve_conj().resolve_neg()
            digest.update(first.contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(repr((value.shape, value.dtype)).encode())
        if not value.dtype.hasobject:
            digest.update(value.reshape(-1)[:_MOST_LOOKED_AT].tobytes())
    elif isinstance(value, (set, frozenset)):
        words = sorted(map(word_of, value)) if len(value) <= left[0] else [len(value)]
        digest.update(repr(words).encode())
    elif isinstance(value, (Mapping, Sequence)):
        digest.update(b"%d" % len(value))
        held = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        for each in islice(held, max(left[0], 0)):
            with contextlib.suppress(Exception):  # a function, say: the others count still
                _look(each, digest, left)
    else:
        made = value.__reduce_ex__(2)
        _look(made if isinstance(made, str) else made[1:3], digest, left)


@lru_cache(maxsize=1024)
def say(names: str, ranks: tuple[int, int]) -> None:
    """Warn, once per process, on the coordinator."""
    logger.warning(
        "rank %d and rank %d hold different values of %s: the checkpoint has those of the lowest rank that holds them, "
        "and the others are lost. To keep each rank's, mark the object with PerRank(…) in the manager's state, or give "
        "each rank's value a name of its own. (Buffers under DistributedDataParallel are meant to be the first rank's)",
        *ranks,
        names,
    )


_RUNS: Final = (32, 256)
"""Digests per set of ranks, of what is declared equal, and of other values: a message can tell so many apart."""

_DIGEST_BYTES: Final = 4
_UNKNOWN: Final = bytes(_DIGEST_BYTES)
_PARTS: Final = 4
"""Places per tensor, one in each quarter: the engine samples the words of a place from one page."""

_SHOWN: Final = (3, 20)


@dataclass(frozen=True, eq=False)
class Held:
    """The memory of a share's ``sampled`` items, in their order, with the bytes as stored."""

    addresses: Ints
    sizes: Ints
    """Bytes; 0 if the host cannot read the memory."""


def sample(
    final: RankPlan, held: Held, seed: int, words_of: Mapping[int, int | None] | None = None
) -> bytes:
    """The digests of this rank's replicas. ``seed``: the same on all ranks, below 2**64. ``words_of``: by position
    among the sampled items, the digest of an object; None: not to be compared.
    """
    _, sets = final.sampled
    quarter = held.sizes // _PARTS
    parts = np.arange(_PARTS)
    addresses = held.addresses[:, None] + quarter[:, None] * parts
    sizes = np.repeat(quarter, _PARTS).reshape(-1, _PARTS)
    sizes[:, -1] += held.sizes - quarter * _PARTS
    # Memory may have been freed since the call: then the save fails as torn, and must not crash here.
    words = np.array(
        sample_words(addresses.ravel().tolist(), sizes.ravel().tolist(), seed, guarded=True),
        np.uint64,
    )
    data = words.reshape(-1, _PARTS)
    is_known = held.sizes > 0
    for at, word in (words_of or {}).items():
        data[at, 0], is_known[at] = word or 0, word is not None
    digests = []
    for begin, end in _runs(sets):
        known = bool(is_known[begin:end].all())
        digests.append(_digest(data[begin:end].tobytes()) if known else _UNKNOWN)
    return b"".join(digests)


def _digest(data: bytes) -> bytes:
    digest = blake2b(data, digest_size=_DIGEST_BYTES).digest()
    return digest if digest != _UNKNOWN else b"\1" * _DIGEST_BYTES


def _runs(sets: Ints) -> list[tuple[int, int]]:
    """Begin and end of each run of ``sampled`` items: up to as many as ``_RUNS`` says for each set."""
    if not len(sets):
        return []
    edges = [0, *(np.flatnonzero(sets[1:] != sets[:-1]) + 1).tolist(), len(sets)]
    runs: list[tuple[int, int]] = []
    for begin, end in pairwise(edges):
        count = min(end - begin, _RUNS[sets[begin] % len(Why)])
        runs += pairwise([begin + (end - begin) * cut // count for cut in range(count + 1)])
    return runs


class Samples:
    """Compares the ranks' samples for one global plan, on the coordinator."""

    def __init__(self, locals_: Sequence[LocalPlan], shares: Sequence[RankPlan]) -> None:
        self._locals = locals_
        self._shares = shares
        self._spans = [_spans(share.sampled[1]) for share in shares]

    def check(self, samples: Sequence[bytes]) -> None:
        """Raise :class:`ReplicasDifferError` if two ranks hold different replicas of what several write, and name other
        values that differ; ``samples`` are by rank.
        """
        seen: dict[int, tuple[int, bytes]] = {}  # by set: a rank, and its digests
        for rank, (said, spans) in enumerate(zip(samples, self._spans, strict=True)):
            for number, begin, end in spans:
                mine = said[begin:end] or _UNKNOWN * ((end - begin) // _DIGEST_BYTES)
                other, theirs = seen.setdefault(number, (rank, mine))
                if mine != theirs:
                    self._compare(rank, mine, other, theirs, begin, number % len(Why) == Why.CUT)
                    if _UNKNOWN in theirs:
                        seen[number] = rank, mine

    def _compare(
        self, rank: int, mine: bytes, other: int, theirs: bytes, begin: int, is_cut: bool
    ) -> None:
        shared, sets = self._shares[rank].sampled
        runs = _runs(sets)[begin // _DIGEST_BYTES :]
        differ = []
        for place, run in zip(range(0, len(mine), _DIGEST_BYTES), runs, strict=False):
            pair = {each[place : place + _DIGEST_BYTES] for each in (mine, theirs)}
            if len(pair) > 1 and _UNKNOWN not in pair:
                differ.append(run)
        if not differ:
            return
        names = self._locals[rank].head.names
        most = _SHOWN[not is_cut]
        shown = "; ".join(
            _named([names[item] for item in shared[slice(*run)]]) for run in differ[:most]
        )
        more = f"; and {len(differ) - most} more" if len(differ) > most else ""
        if not is_cut:
            say(f"{shown}{more}", (other, rank))
            return
        raise ReplicasDifferError(
            f"rank {other} and rank {rank} hold different values of {shown}{more}. Each would write a part of them, "
            f"as of replicas that are equal, and what is stored would be a mixture. Broadcast the values, give "
            f"each rank's tensor a name of its own, or use DataStatesSavePlanner(split_replicas=False)"
        )


def _named(names: Sequence[str]) -> str:
    if len(names) == 1:
        return repr(names[0])
    return f"one of {len(names)} values from {names[0]!r} to {names[-1]!r}"


def _spans(sets: Ints) -> list[tuple[int, int, int]]:
    """For each set that a rank is in: its number, and where its digests begin and end among the rank's
    digests (bytes).
    """
    spans: list[tuple[int, int, int]] = []
    for place, (begin, _) in enumerate(_runs(sets)):
        number, at = int(sets[begin]), place * _DIGEST_BYTES
        if spans and spans[-1][0] == number:
            at = spans.pop()[1]
        spans.append((number, at, (place + 1) * _DIGEST_BYTES))
    return spans
