"""Which of a test's parameters ``make test`` asks, and which ``make test-thorough``: no item is in both.

``make test-thorough PART=…`` asks a third of its items: :func:`part_of` says which third an item is in.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

SHARES = (0.35, 0.45, 0.2)
"""The part of the items that each third has. The third with least has most of the `Makefile`'s ``THOROUGH_…``."""

ParameterSet = type(pytest.param())


def sampled(values: Iterable[Any], keep: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Parameters for ``parametrize``: ``make test`` takes those that ``keep`` names, thorough the others.

    Args:
        values: as for ``parametrize``; a tuple has one value for each of several names (else: ``pytest.param(tuple)``).
        keep: values, or their ids; or whether to keep one.
    """
    given = list(values)
    kept = [_is_kept(value, keep) for value in given]
    assert any(kept), "make test would not ask this at all"
    assert callable(keep) or sum(kept) == len(keep), "what is to be kept is not there, or is twice"
    return [
        _param(value, () if here else (pytest.mark.thorough,))
        for value, here in zip(given, kept, strict=True)
    ]


def _is_kept(value: Any, keep: Collection[Any] | Callable[[Any], bool]) -> bool:
    if callable(keep):
        return keep(value)
    plain, name = value, str(value)
    if isinstance(value, ParameterSet):
        plain = value.values[0] if len(value.values) == 1 else value.values
        name = value.id if value.id is not None else str(plain)
    return plain in keep or name in keep


def _param(value: Any, marks: Collection[pytest.MarkDecorator]) -> Any:
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, *marks])
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)


def tries(few: int, many: int, variable: str | None = None) -> list[Any]:
    """Numbers for ``parametrize``: ``few`` in ``make test``, ``many`` in ``make test-thorough``.

    Where the environment ``variable`` is set, its number is the only one, in ``make test``.
    """
    if variable and variable in os.environ:
        return [pytest.param(int(os.environ[variable]), id="chosen")]
    return [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.thorough)]


def part_of(nodeid: str) -> int:
    """The third of ``make test-thorough`` that asks this item: 1, 2 or 3.

    By its name alone: an item stays where it is when others come or go, and every process finds the same.
    """
    place = zlib.crc32(nodeid.encode()) / 2**32
    return 1 + sum(place >= end for end in itertools.accumulate(SHARES[:-1]))
