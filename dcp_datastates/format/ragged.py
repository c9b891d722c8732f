"""Ragged arrays: rows of different lengths, one after another and without padding."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

Number = TypeVar("Number", np.int64, np.float64)

Hashes = npt.NDArray[np.uint64]

_ODD = np.uint64(0x9E3779B97F4A7C15)


def starts_of(lengths: Ints) -> Ints:
    """The start of each row."""
    return np.cumsum(lengths) - lengths


def distinct(numbers: Ints) -> list[int]:
    """The different ones of small ``numbers``, ascending. (For that, ``np.unique`` imports ``numpy.ma``: 13 ms.)"""
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found


def groups(numbers: npt.NDArray[Any]) -> list[Ints]:
    """The positions of each value in ``numbers``, by ascending values."""
    order = np.argsort(numbers, kind="stable")
    cuts = np.flatnonzero(np.diff(numbers[order])) + 1
    return [each for each in np.split(order, cuts) if len(each)]


def positions(starts: Ints, lengths: Ints) -> Ints:
    """The positions of these rows' values, row after row."""
    total = int(lengths.sum())
    return np.arange(total) + np.repeat(starts - starts_of(lengths), lengths)


def volumes(lengths: Ints, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """(N,): the product of each row's values; 1 for an empty row."""
    product = np.ones(len(lengths), dtype=values.dtype)
    starts = starts_of(lengths)
    for place in range(int(lengths.max(initial=0))):
        rows = lengths > place
        if rows.all():
            product *= values[starts + place]
        else:
            product[rows] *= values[starts[rows] + place]
    return product


def sums(lengths: Ints, values: Ints) -> Ints:
    """(N,): the sum of each row's values; 0 for an empty row."""
    running = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=running[1:])
    ends = np.cumsum(lengths)
    total: Ints = running[ends] - running[ends - lengths]
    return total


def fingerprints(keys: Ints, lengths: Ints, *columns: Ints, salt: int = 0) -> Hashes:
    """(N,): a 64-bit hash of each row: of its key and its values in ragged ``columns``, which all have ``lengths``."""
    result = _mixed(keys.astype(np.uint64) * _ODD + lengths.astype(np.uint64) + np.uint64(salt))
    ends = np.cumsum(lengths)
    place = positions(np.zeros_like(lengths), lengths).astype(np.uint64)
    sums = np.zeros(len(place) + 1, dtype=np.uint64)
    for number, column in enumerate(columns, start=1):
        where = _mixed(place + np.uint64((salt + number) << 32))
        np.cumsum(_mixed(column.astype(np.uint64) ^ where), out=sums[1:])
        result = _mixed(result + (sums[ends] - sums[ends - lengths]))
    return result


def leaders(prints: Hashes, keys: Ints, lengths: Ints, *columns: Ints) -> Ints:
    """(N,): for each row, the first row that is equal to it (perhaps itself).

    Compares rows with equal fingerprints. Rows that differ all the same are compared among themselves, with other
    fingerprints, until all are resolved.
    """
    result = np.arange(len(keys))
    starts = starts_of(lengths)
    rest, salt = result, 0
    while len(rest):
        order = np.argsort(prints, kind="stable")
        ordered = prints[order]
        first = np.ones(len(rest), dtype=bool)
        first[1:] = ordered[1:] != ordered[:-1]
        if first.all():
            break
        leading = np.empty(len(rest), dtype=np.int64)
        leading[order] = rest[order[first]][np.cumsum(first) - 1]
        followers = np.flatnonzero(leading != rest)
        same = equal(rest[followers], leading[followers], keys, lengths, *columns)
        result[rest[followers[same]]] = leading[followers[same]]
        rest = rest[followers[~same]]
        salt += 1
        where = positions(starts[rest], lengths[rest])
        parts = [column[where] for column in columns]
        prints = fingerprints(keys[rest], lengths[rest], *parts, salt=salt)
    return result


def equal(
    rows: Ints, others: Ints, keys: Ints, lengths: Ints, *columns: Ints
) -> npt.NDArray[np.bool_]:
    """Whether each of these rows has the key and the values in ragged ``columns`` that the other row has."""
    same: npt.NDArray[np.bool_] = (keys[rows] == keys[others]) & (lengths[rows] == lengths[others])
    compared = np.flatnonzero(same)
    starts, count = starts_of(lengths), lengths[rows[compared]]
    mine = positions(starts[rows[compared]], count)
    theirs = positions(starts[others[compared]], count)
    row_of = np.repeat(compared, count)
    for column in columns:
        same[row_of[column[mine] != column[theirs]]] = False
    return same


def _mixed(values: Hashes) -> Hashes:
    """Splitmix64's finalizer (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed
