"""Replicas: which ranks hold which chunks, and whether replicas are equal.

*Holdings* are the chunks of all ranks' local plans, each once, with the ranks that hold it. Ranks with equal plans (all
ranks of a data-parallel job, or the replicas of one shard) form one *variant*, and share its work. A *row* is an item
of a variant; rows of the same chunk form one *group*. All ranks must agree on a name: whether it is an object or a
tensor, its shape and its dtype.

*Samples*: ranks that write parts of one tensor must hold the same values; otherwise the checkpoint would be a mixture
that no rank ever had. Where one writes what others hold, and nothing declares them equal, a difference is named
(``differing.py``). So every rank samples its replicas, and the coordinator compares the samples. A
sample is a few words of each tensor, at places that are the same on all ranks and change from save to save. Ranks send
one digest per run of tensors, so that an error can name the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates._native import sample_words
from dcp_datastates.errors import ReplicasDifferError
from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.format.ragged import (
    Hashes,
    fingerprints,
    leaders,
    positions,
    starts_of,
    volumes,
)
from dcp_datastates.planning.differing import say
from dcp_datastates.planning.local_plan import SHARD, LocalPlan, properties_key
from dcp_datastates.planning.rank_plan import RankPlan

__all__ = ["Held", "Holdings", "Samples", "gather", "sample"]

_RUNS: Final = (32, 256)
"""Digests per set of ranks, of what is declared equal, and of other values: a message can tell so many apart."""

_DIGEST_BYTES: Final = 4
_UNKNOWN: Final = bytes(_DIGEST_BYTES)
_PARTS: Final = 4
"""Places per tensor, one in each quarter: the engine samples the words of a place from one page."""

_SHOWN: Final = (3, 20)


@dataclass(frozen=True, eq=False)
class Names:
    """F names, in order of first appearance: by rank, then in the order of the rank's items."""

    names: tuple[str, ...]
    table: tuple[TensorProperties, ...]
    properties: Ints
    """(F,): index into ``table``, from the first rank that has the name; -1 for an object."""
    ndims: Ints
    shapes: Ints
    """Ragged, F entries."""


@dataclass(frozen=True, eq=False)
class Holdings:
    """T rows of V variants, in G groups."""

    names: Names
    ranks: list[Ints]
    """V arrays: the ranks of each variant, ascending; variants are in order of their lowest rank."""
    variant: Ints
    """(T,)"""
    item: Ints
    """(T,): index into the variant's items."""
    name: Ints
    """(T,): index into ``names``."""
    ndims: Ints
    offsets: Ints
    """Ragged, T entries, like ``sizes``."""
    sizes: Ints
    nbytes: Ints
    """(T,): the chunk's bytes; 0 for an object."""
    extent: Ints
    """(T,): rows of dimension 0 within the chunk; 1 if it has no dimensions, or is an object."""
    order: Ints
    """Rows sorted by group, and within a group by variant, each variant once."""
    count: Ints
    """(G,): the number of rows of each group in ``order``."""
    place: Ints
    """(G,): the position of the group's name among all names, sorted."""
    declared: npt.NDArray[np.bool_]
    """(G,): whether all holders declare it a SHARD, and so equal on all of them. A plain tensor declares nothing about
    other ranks' tensors of the same name.
    """
    prints: Hashes
    """(G,): 64-bit hash of name, offsets and sizes; like ``place``, independent of the order of ranks and items."""


def gather(plans: Sequence[LocalPlan]) -> Holdings:
    """The holdings of all plans, by rank. ValueError: the plans contradict each other, or one has a chunk twice."""
    variants, ranks = _variants(plans)
    heads, head_of = _distinct_heads(variants)
    ids, names = agree([variants[head] for head in heads], [int(ranks[head][0]) for head in heads])
    lengths = np.array([len(plan.names) for plan in variants], dtype=np.int64)
    variant = np.repeat(np.arange(len(variants)), lengths)
    name = np.concatenate([ids[head] for head in head_of])
    kinds = np.concatenate([plan.kinds for plan in variants])
    ndims = names.ndims[name]
    offsets = np.concatenate([plan.offsets for plan in variants])
    sizes = np.concatenate([plan.sizes for plan in variants])
    # Validation reports negative sizes; here they must not count as a load.
    nbytes = volumes(ndims, np.maximum(sizes, 0)) * _item_sizes(names.table)[names.properties[name]]
    prints = fingerprints(_hashed(names.names)[name], ndims, offsets, sizes)
    leader = leaders(prints, name, ndims, offsets, sizes)
    order, count = _grouped(leader)
    order, count = _without_repetition(order, count, variant, nbytes, names.names, name, ranks)
    first = order[starts_of(count)]
    return Holdings(
        names=names,
        ranks=ranks,
        variant=variant,
        item=np.arange(len(variant)) - np.repeat(starts_of(lengths), lengths),
        name=name,
        ndims=ndims,
        offsets=offsets,
        sizes=sizes,
        nbytes=nbytes,
        extent=_extents(ndims, sizes),
        order=order,
        count=count,
        place=_sorted_places(names.names)[name[first]],
        declared=np.logical_and.reduceat(kinds[order] == SHARD, starts_of(count))
        if len(count)
        else np.zeros(0, bool),
        prints=prints[first],
    )


def _variants(plans: Sequence[LocalPlan]) -> tuple[list[LocalPlan], list[Ints]]:
    by_digest: dict[bytes, list[int]] = {}
    for rank, plan in enumerate(plans):
        by_digest.setdefault(plan.digest, []).append(rank)
    ranks = list(by_digest.values())
    return [plans[same[0]] for same in ranks], [np.array(same, dtype=np.int64) for same in ranks]


def _distinct_heads(variants: list[LocalPlan]) -> tuple[list[int], list[int]]:
    """The variants with distinct heads; and for each variant, the position of its head among them."""
    numbers: dict[tuple[int, ...], int] = {}
    heads: list[int] = []
    head_of = []
    for number, plan in enumerate(variants):
        columns = (plan.names, plan.kinds, plan.properties, plan.table, plan.ndims, plan.shapes)
        found = numbers.setdefault(tuple(map(id, columns)), len(heads))
        if found == len(heads):
            heads.append(number)
        head_of.append(found)
    return heads, head_of


def _item_sizes(table: tuple[TensorProperties, ...]) -> Ints:
    """Bytes per element for each entry of the table; one more entry for -1, the objects."""
    return np.array([*(entry.dtype.itemsize for entry in table), 0], dtype=np.int64)


def _extents(ndims: Ints, sizes: Ints) -> Ints:
    result = np.ones(len(ndims), dtype=np.int64)
    rows = ndims > 0
    result[rows] = sizes[starts_of(ndims)[rows]]
    return result


def _sorted_places(names: tuple[str, ...]) -> Ints:
    """Each name's position among the sorted names: independent of the order of ranks and items."""
    places = np.empty(len(names), dtype=np.int64)
    places[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    return places


def _hashed(names: tuple[str, ...]) -> Ints:
    """Hashes of the names. Not :func:`hash`, which differs between processes."""
    digests = [blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8) for name in names]
    return np.frombuffer(b"".join(digest.digest() for digest in digests), np.int64)


def _grouped(leader: Ints) -> tuple[Ints, Ints]:
    """Rows sorted by group, groups by their first row; and each group's number of rows."""
    own = leader == np.arange(len(leader))
    if own.all():
        return leader, np.ones(len(leader), dtype=np.int64)
    group = (np.cumsum(own) - 1)[leader]
    return np.argsort(group, kind="stable"), np.bincount(group)


def _without_repetition(
    order: Ints,
    count: Ints,
    variant: Ints,
    nbytes: Ints,
    names: tuple[str, ...],
    name: Ints,
    ranks: list[Ints],
) -> tuple[Ints, Ints]:
    """Drop duplicate empty chunks of one rank; reject other duplicates: a chunk must not have two writers."""
    if len(count) == len(order):
        return order, count
    group = np.repeat(np.arange(len(count)), count)
    again = np.zeros(len(order), dtype=bool)
    again[1:] = (group[1:] == group[:-1]) & (variant[order[1:]] == variant[order[:-1]])
    wrong = order[again & (nbytes[order] > 0)]
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"{names[name[row]]!r}: rank {ranks[variant[row]][0]} has one chunk of it twice in its plan"
        )
    return order[~again], np.bincount(group[~again], minlength=len(count))


# --- whether ranks agree on each name -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Said:
    """The items of all heads, concatenated."""

    table: tuple[TensorProperties, ...]
    rank: Ints
    name: Ints
    properties: Ints
    ndims: Ints
    shapes: Ints


def agree(heads: Sequence[LocalPlan], ranks: Sequence[int]) -> tuple[list[Ints], Names]:
    """For each plan, its items' names as numbers; and the names, with the properties that all ranks agree on.

    ``ranks``: the lowest rank with each plan, ascending. ValueError: two ranks do not agree.
    """
    ids, names = _numbered(heads)
    table, properties = _merged_tables(heads)
    said = _Said(
        table,
        np.repeat(np.array(ranks, dtype=np.int64), [len(head.names) for head in heads]),
        np.concatenate(ids),
        np.concatenate(properties),
        np.concatenate([head.ndims for head in heads]),
        np.concatenate([head.shapes for head in heads]),
    )
    first = np.empty(len(names), dtype=np.int64)
    first[said.name[::-1]] = np.arange(len(said.name))[::-1]
    _refuse_conflicts(said, names, first)
    shapes = said.shapes[positions(starts_of(said.ndims)[first], said.ndims[first])]
    return ids, Names(names, table, said.properties[first], said.ndims[first], shapes)


def _numbered(heads: Sequence[LocalPlan]) -> tuple[list[Ints], tuple[str, ...]]:
    numbers: dict[str, int] = {}
    known: dict[tuple[str, ...], Ints] = {}
    ids = []
    for head in heads:
        if head.names not in known:
            found = [numbers.setdefault(name, len(numbers)) for name in head.names]
            known[head.names] = np.array(found, dtype=np.int64)
        ids.append(known[head.names])
    return ids, tuple(numbers)


def _merged_tables(
    heads: Sequence[LocalPlan],
) -> tuple[tuple[TensorProperties, ...], list[Ints]]:
    """One merged table, and each plan's indices into it."""
    numbers: dict[tuple[Any, ...], int] = {}
    table: list[TensorProperties] = []
    properties = []
    for head in heads:
        places = []
        for entry in head.table:
            places.append(numbers.setdefault(properties_key(entry), len(table)))
            if places[-1] == len(table):
                table.append(entry)
        properties.append(np.array([*places, -1], dtype=np.int64)[head.properties])
    return tuple(table), properties


def _refuse_conflicts(said: _Said, names: tuple[str, ...], first: Ints) -> None:
    """Compare each item with the first of its name; ValueError if they differ."""
    reference = first[said.name]
    compared = np.flatnonzero(reference != np.arange(len(reference)))
    one, other = reference[compared], compared
    dtypes: dict[torch.dtype, int] = {}
    dtype_of = [dtypes.setdefault(entry.dtype, len(dtypes)) for entry in said.table]
    dtype = np.array([*dtype_of, -1], dtype=np.int64)[said.properties]
    differ: npt.NDArray[np.bool_] = (dtype[one] != dtype[other]) | (
        said.ndims[one] != said.ndims[other]
    )
    alike = np.flatnonzero(~differ)
    starts, count = starts_of(said.ndims), said.ndims[one[alike]]
    mine = said.shapes[positions(starts[one[alike]], count)]
    theirs = said.shapes[positions(starts[other[alike]], count)]
    differ[np.repeat(alike, count)[mine != theirs]] = True
    wrong = np.flatnonzero(differ)
    if len(wrong):
        a, b = int(one[wrong[0]]), int(other[wrong[0]])
        raise ValueError(
            f"ranks do not agree on {names[said.name[a]]!r}: on rank {said.rank[a]} it is "
            f"{_described(said, a)}, on rank {said.rank[b]} {_described(said, b)}"
        )


def _described(said: _Said, at: int) -> str:
    if said.properties[at] < 0:
        return "an object, not a tensor"
    begin = int(said.ndims[:at].sum())
    shape = said.shapes[begin : begin + int(said.ndims[at])].tolist()
    return f"a tensor of shape {shape} and dtype {said.table[said.properties[at]].dtype}"


# --- whether replicas are equal -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Held:
    """The memory of a share's ``shared`` items, in their order, with the bytes as stored."""

    addresses: Ints
    sizes: Ints
    """Bytes; 0 if the host cannot read the memory."""


def sample(
    final: RankPlan, held: Held, seed: int, words_of: Mapping[int, int | None] | None = None
) -> bytes:
    """The digests of this rank's replicas. ``seed``: the same on all ranks, below 2**64. ``words_of``: by position
    among the shared items, the digest of an object; None: not to be compared.
    """
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
    for begin, end in _runs(final.sets):
        known = bool(is_known[begin:end].all())
        digests.append(_digest(data[begin:end].tobytes()) if known else _UNKNOWN)
    return b"".join(digests)


def _digest(data: bytes) -> bytes:
    digest = blake2b(data, digest_size=_DIGEST_BYTES).digest()
    return digest if digest != _UNKNOWN else b"\1" * _DIGEST_BYTES


def _runs(sets: Ints) -> list[tuple[int, int]]:
    """Begin and end of each run of ``shared`` items: up to as many as ``_RUNS`` says for each set."""
    if not len(sets):
        return []
    edges = [0, *(np.flatnonzero(sets[1:] != sets[:-1]) + 1).tolist(), len(sets)]
    runs: list[tuple[int, int]] = []
    for begin, end in pairwise(edges):
        count = min(end - begin, _RUNS[sets[begin] % 2])
        runs += pairwise([begin + (end - begin) * cut // count for cut in range(count + 1)])
    return runs


class Samples:
    """Compares the ranks' samples for one global plan, on the coordinator."""

    def __init__(self, locals_: Sequence[LocalPlan], shares: Sequence[RankPlan]) -> None:
        self._locals = locals_
        self._shares = shares
        self._spans = [_spans(share.sets) for share in shares]

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
                    self._compare(rank, mine, other, theirs, begin, is_cut=not number % 2)
                    if _UNKNOWN in theirs:
                        seen[number] = rank, mine

    def _compare(
        self, rank: int, mine: bytes, other: int, theirs: bytes, begin: int, is_cut: bool
    ) -> None:
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
        most = _SHOWN[not is_cut]
        shown = "; ".join(
            _named([names[item] for item in share.shared[slice(*run)]]) for run in differ[:most]
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
