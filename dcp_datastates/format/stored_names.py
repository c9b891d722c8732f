"""The names of stored values: selection by keys, and names left unread.

A stored name (FQN) is the path of a value in the saved state, joined by dots. A key is a name, or a prefix of names
that ends before a dot.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_datastates.errors import ConfigurationError, IncompatibleStateError

__all__ = ["as_keys", "chosen", "is_under", "unread"]

_SHOWN: Final = 5


def as_keys(option: str, keys: str | Iterable[str]) -> frozenset[str]:
    """One key or several, as a set; :class:`ConfigurationError` for anything else."""
    if isinstance(keys, str):
        return frozenset([keys])
    if isinstance(keys, Iterable):
        found = list(keys)
        if all(isinstance(key, str) for key in found):
            return frozenset(found)
    raise ConfigurationError(f"{option}={keys!r} must be a name, or names, such as 'model'")


def is_under(name: str, keys: frozenset[str]) -> bool:
    """Whether one of ``keys`` is ``name``, or a prefix of it that ends before a dot."""
    return bool(keys) and not keys.isdisjoint(_prefixes(name))


def chosen(names: Iterable[str], keys: frozenset[str]) -> list[str]:
    """The ``names`` that are under ``keys``, in their order.

    Raises :class:`IncompatibleStateError`, listing similar names, for a key without any name under it.
    """
    found = [name for name in names if is_under(name, keys)]
    missing = keys.difference(chain.from_iterable(map(_prefixes, found)))
    if missing:
        key = min(missing)
        raise IncompatibleStateError(f"the checkpoint has no {key!r}; {_near(list(names), key)}")
    return found


def unread(stored: Mapping[str, object], asked: set[str]) -> list[str]:
    """The names in ``stored`` that were not ``asked`` for, without values that have no bytes."""
    left = [name for name in stored if name not in asked]  # looks up no entries of the others
    return [name for name in left if not _is_empty(stored[name])]


def _is_empty(saved: object) -> bool:
    return isinstance(saved, TensorStorageMetadata) and 0 in saved.size


def _prefixes(name: str) -> Iterator[str]:
    """The prefixes of ``a.b.c`` are ``a``, ``a.b`` and itself."""
    for place, character in enumerate(name):
        if character == ".":
            yield name[:place]
    yield name


def _near(names: list[str], key: str) -> str:
    keys = dict.fromkeys(prefix for name in names for prefix in _prefixes(name))
    near = [known for known in keys if known.endswith(f".{key}")][:_SHOWN]
    near += difflib.get_close_matches(key, keys.keys() - near, _SHOWN - len(near) or 1)
    if near:
        return f"did you mean {' or '.join(map(repr, near[:_SHOWN]))}?"
    first = list(dict.fromkeys(next(_prefixes(name)) for name in names))
    more = ", …" if len(first) > _SHOWN else ""
    return f"it has {', '.join(map(repr, first[:_SHOWN]))}{more}" if first else "it is empty"
