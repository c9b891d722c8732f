"""What ranks say of each name: whether it is an object or a tensor, its shape and its dtype. They must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.format.ragged import positions, starts_of
from dcp_datastates.planning.local_plan import LocalPlan, properties_key

__all__ = ["Names", "agree"]


@dataclass(frozen=True, eq=False)
class Names:
    """F names, in order of first appearance: by rank, then as the rank's items are."""

    names: tuple[str, ...]
    table: tuple[TensorProperties, ...]
    properties: Ints
    """(F,): index into ``table``, as the first rank says it that has the name; -1 for an object."""
    ndims: Ints
    shapes: Ints
    """Ragged, F entries."""


@dataclass(frozen=True, eq=False)
class _Said:
    """All items of all heads, one after another."""

    table: tuple[TensorProperties, ...]
    rank: Ints
    name: Ints
    properties: Ints
    ndims: Ints
    shapes: Ints


def agree(heads: Sequence[LocalPlan], ranks: Sequence[int]) -> tuple[list[Ints], Names]:
    """For each plan its items' names as numbers; and what all say of these names.

    ``ranks``: the lowest rank that has each plan, ascending. ValueError: two ranks do not agree.
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
    """One table, and each plan's indices into it."""
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
    """Compare each item with the first of its name."""
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
