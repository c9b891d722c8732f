"""Replicas: which ranks hold which chunks.

*Holdings* are the chunks of all ranks' local plans, each once, with the ranks that hold it. Ranks with equal plans (all
ranks of a data-parallel job, or the replicas of one shard) form one *variant*, and share its work. A *row* is an item
of a variant; rows of the same chunk form one *group*. Say, ``a`` is sharded over two ranks and replicated, and all
ranks hold ``b``::

    rank 0: a[0:4], b        rank 1: a[4:8], b        rank 2: a[0:4], b        rank 3: a[4:8], b

    variant    0: ranks 0, 2       1: ranks 1, 3
    row        0         1         2         3
    name       a         b         a         b
    offsets    0  0      0         4  0      0         ragged: a has two dimensions, b has one
    sizes      4  9      3         4  9      3
    group      0         1         2         1

    order      0 | 1 3 | 2         the rows, sorted by group
    count      1 | 2   | 1

All ranks must agree on a name: whether it is an object or a tensor, its shape and its dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates.format.ragged import (
    Hashes,
    Ints,
    equal,
    fingerprints,
    leaders,
    positions,
    starts_of,
    volumes,
)
from dcp_datastates.planning.messages import SHARD, Head, LocalPlan, extents_of, properties_key


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
    lowest: dict[Head, int] = {}  # the lowest rank with each distinct head
    for plan, of_variant in zip(variants, ranks, strict=True):
        lowest.setdefault(plan.head, int(of_variant[0]))
    ids, names = agree(lowest)
    lengths = np.array([len(plan.head.names) for plan in variants], dtype=np.int64)
    variant = np.repeat(np.arange(len(variants)), lengths)
    name = np.concatenate([ids[plan.head] for plan in variants])
    kinds = np.concatenate([plan.head.kinds for plan in variants])
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
        extent=extents_of(ndims, sizes),
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


def _item_sizes(table: tuple[TensorProperties, ...]) -> Ints:
    """Bytes per element for each entry of the table; one more entry for -1, the objects."""
    return np.array([*(entry.dtype.itemsize for entry in table), 0], dtype=np.int64)


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
class _Rows:
    """The items of all distinct heads, one after another."""

    table: tuple[TensorProperties, ...]
    rank: Ints
    """The lowest rank with the item's head."""
    name: Ints
    properties: Ints
    ndims: Ints
    shapes: Ints


def agree(heads: Mapping[Head, int]) -> tuple[dict[Head, Ints], Names]:
    """For each head, its items' names as numbers; and the names, with the properties that all ranks agree on.

    ``heads``: each distinct one, with the lowest rank that has it; ranks ascend. ValueError: two ranks do not agree.
    """
    numbers: dict[str, int] = {}
    ids = {
        head: np.array([numbers.setdefault(name, len(numbers)) for name in head.names], np.int64)
        for head in heads
    }
    table, properties = _merged_tables(heads)
    rows = _Rows(
        table,
        np.repeat(list(heads.values()), [len(head.names) for head in heads]),
        np.concatenate(list(ids.values())),
        np.concatenate(properties),
        np.concatenate([head.ndims for head in heads]),
        np.concatenate([head.shapes for head in heads]),
    )
    names = tuple(numbers)
    first = np.empty(len(names), dtype=np.int64)
    first[rows.name[::-1]] = np.arange(len(rows.name))[::-1]
    _refuse_conflicts(rows, names, first)
    shapes = rows.shapes[positions(starts_of(rows.ndims)[first], rows.ndims[first])]
    return ids, Names(names, table, rows.properties[first], rows.ndims[first], shapes)


def _merged_tables(heads: Iterable[Head]) -> tuple[tuple[TensorProperties, ...], list[Ints]]:
    """One merged table, and each head's indices into it."""
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


def _refuse_conflicts(rows: _Rows, names: tuple[str, ...], first: Ints) -> None:
    """ValueError if an item has another dtype or shape than the first of its name."""
    dtypes: dict[torch.dtype, int] = {}
    dtype_of = [dtypes.setdefault(entry.dtype, len(dtypes)) for entry in rows.table]
    dtype = np.array([*dtype_of, -1], dtype=np.int64)[rows.properties]
    same = equal(np.arange(len(dtype)), first[rows.name], dtype, rows.ndims, rows.shapes)
    wrong = np.flatnonzero(~same)
    if len(wrong):
        a, b = int(first[rows.name[wrong[0]]]), int(wrong[0])
        raise ValueError(
            f"ranks do not agree on {names[rows.name[a]]!r}: on rank {rows.rank[a]} it is "
            f"{_described(rows, a)}, on rank {rows.rank[b]} {_described(rows, b)}"
        )


def _described(rows: _Rows, at: int) -> str:
    if rows.properties[at] < 0:
        return "an object, not a tensor"
    begin = int(rows.ndims[:at].sum())
    shape = rows.shapes[begin : begin + int(rows.ndims[at])].tolist()
    return f"a tensor of shape {shape} and dtype {rows.table[rows.properties[at]].dtype}"
