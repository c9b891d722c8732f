"""Who holds what: the chunks of all ranks' local plans, each once, with the ranks that hold it.

Ranks with equal plans (all of a data-parallel job's; the replicas of one shard) are one *variant*, and no work
is done for each of them. A *row* is an item of a variant; rows that are the same chunk are one *group*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.format.ragged import Hashes, fingerprints, leaders, starts_of, volumes
from dcp_datastates.planning.local_plan import SHARD, LocalPlan
from dcp_datastates.planning.names import Names, agree

__all__ = ["Holdings", "gather"]


@dataclass(frozen=True, eq=False)
class Holdings:
    """T rows of V variants, in G groups."""

    names: Names
    ranks: list[Ints]
    """V arrays: the ranks of each variant, ascending; variants are in order of their lowest rank."""
    variant: Ints
    """(T,)"""
    item: Ints
    """(T,): which one of the variant's items."""
    name: Ints
    """(T,): index into ``names``."""
    ndims: Ints
    offsets: Ints
    """Ragged, T entries, as ``sizes``."""
    sizes: Ints
    nbytes: Ints
    """(T,): of the chunk; 0 for an object."""
    extent: Ints
    """(T,): rows of dimension 0 within the chunk; 1 if it has none, or is an object."""
    order: Ints
    """Rows by group, and within a group by variant, each variant once."""
    count: Ints
    """(G,): rows of each group in ``order``."""
    place: Ints
    """(G,): of the group's name among all names, sorted."""
    declared: npt.NDArray[np.bool_]
    """(G,): whether all that hold it say that it is a chunk, and so the same on each of them. A plain tensor says
    nothing of other ranks' tensors of its name.
    """
    prints: Hashes
    """(G,): 64 bits of name and box: like ``place`` the same whatever the order of ranks and items."""


def gather(plans: Sequence[LocalPlan]) -> Holdings:
    """All plans, by rank. ValueError: they contradict each other, or one says a chunk twice."""
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
    # A negative size is the validation's to tell; here it must not make a load.
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
    """Variants of which no two share all that a head has; and for each variant which of them is like it."""
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
    """In bytes; one more for -1, the objects."""
    return np.array([*(entry.dtype.itemsize for entry in table), 0], dtype=np.int64)


def _extents(ndims: Ints, sizes: Ints) -> Ints:
    result = np.ones(len(ndims), dtype=np.int64)
    rows = ndims > 0
    result[rows] = sizes[starts_of(ndims)[rows]]
    return result


def _sorted_places(names: tuple[str, ...]) -> Ints:
    """Each name's place among the sorted ones: a number that depends on no order of ranks or items."""
    places = np.empty(len(names), dtype=np.int64)
    places[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    return places


def _hashed(names: tuple[str, ...]) -> Ints:
    """Not by :func:`hash`, which is another one in each process."""
    digests = [blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8) for name in names]
    return np.frombuffer(b"".join(digest.digest() for digest in digests), np.int64)


def _grouped(leader: Ints) -> tuple[Ints, Ints]:
    """Rows by group, groups by their first row; and how many rows each has."""
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
    """Leave out what a rank says again, if it is empty: two writers of one chunk would be an error."""
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
