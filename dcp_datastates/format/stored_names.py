"""The names of stored values, and their selection by keys.

A stored name (FQN) is the path of a value in the saved state, joined by dots. A key is a name, or a prefix of names
that ends before a dot.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Final

from dcp_datastates.errors import ConfigurationError

Box = tuple[tuple[int, int], ...]
"""The begin and end of a shard in each dimension."""

WRAPPER: Final = "__wrapper__"
"""The last part of the name under which the class of a wrapper subclass is stored, beside its inner tensors."""

_SHARD: Final = re.compile(r"\.\[((?:\d+:\d+,?)*)\]$")
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


def shard_name(box: Box) -> str:
    """The name, below that of a DTensor around a wrapper subclass, of the shard at ``box``."""
    return f"[{','.join(f'{begin}:{end}' for begin, end in box)}]"


def wrappers(names: Iterable[str]) -> dict[str, dict[str, Box | None]]:
    """The names of the wrapper subclasses whose parts are among ``names``; for each, the prefix of the parts of each
    stored shard, and the shard's place: None if the wrapper was no DTensor.
    """
    found: dict[str, dict[str, Box | None]] = {}
    ending = f".{WRAPPER}"
    for name in names:
        if name.endswith(ending):
            prefix = name.removesuffix(ending)
            shard = _SHARD.search(prefix)
            if shard is None:
                found.setdefault(prefix, {})[prefix] = None
            else:
                ends = [edge.split(":") for edge in shard[1].split(",") if edge]
                place = tuple((int(begin), int(end)) for begin, end in ends)
                found.setdefault(prefix[: shard.start()], {})[prefix] = place
    return found


def is_under(name: str, keys: frozenset[str]) -> bool:
    """Whether one of ``keys`` is ``name``, or a prefix of it that ends before a dot."""
    return bool(keys) and not keys.isdisjoint(prefixes_of(name))


def prefixes_of(name: str) -> Iterator[str]:
    """The prefixes of ``a.b.c`` are ``a``, ``a.b`` and itself."""
    place = name.find(".")
    while place >= 0:
        yield name[:place]
        place = name.find(".", place + 1)
    yield name


def near(names: list[str], key: str) -> str:
    """Which of ``names``, or of their prefixes, may have been meant by ``key``, in words."""
    keys = dict.fromkeys(prefix for name in names for prefix in prefixes_of(name))
    near = [known for known in keys if known.endswith(f".{key}")][:_SHOWN]
    near += difflib.get_close_matches(key, keys.keys() - near, _SHOWN - len(near) or 1)
    if near:
        return f"did you mean {' or '.join(map(repr, near[:_SHOWN]))}?"
    first = list(dict.fromkeys(next(prefixes_of(name)) for name in names))
    more = ", …" if len(first) > _SHOWN else ""
    return f"it has {', '.join(map(repr, first[:_SHOWN]))}{more}" if first else "it is empty"
