"""The paths of values in a saved state, with the types of keys, and nested states that are built from them.

DCP's own paths have every key as a string, and lack empty dicts. This package's have both. A part of a path is

- a string: that key of a dict;
- an integer: that index of a list;
- ``(key,)``: that key of a dict, which is no string; ``(key, text)`` if the name has another text for it;
- ``()``, at the end only: there is an empty dict, which has no stored value.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any, Final

import torch

from dcp_datastates.errors import CheckpointCorruptError
from dcp_datastates.format import values
from dcp_datastates.format.values import ValueRefused, described
from dcp_datastates.process.job_log import once_per_job

logger = logging.getLogger(__name__)

KeyPath = tuple[str | int | tuple[Any, ...], ...]

EMPTY: Final = ()


def part_of(key: Any) -> str | tuple[Any, ...]:
    """The part of a path for the ``key`` of a dict. Warns of a key that can be stored as a string only."""
    text = str(key)
    if type(key) is str:
        return text
    try:
        # Equal, with the same hash: a subclass of int such as an enumeration's member, or NumPy's integers.
        stored = next(
            (each for each in _simple(key) if each == key and hash(each) == hash(key)), key
        )
        values.to_json(stored)
    except (values.ValueRefused, TypeError, ValueError, OverflowError):
        _say(type(key).__name__, text[:100])
        return text
    if type(stored) is str and stored == text:
        return text
    return (stored,) if str(stored) == text else (stored, text)


def _simple(key: Any) -> Iterator[Any]:
    if type(key) is not bool:
        if isinstance(key, str):
            yield str.__str__(key)
        elif hasattr(key, "__index__"):
            yield int(key)


@cache
def _say(kind: str, text: str) -> None:
    logger.log(
        once_per_job(logging.WARNING),
        "a dict of the state has the key %r, a %s, which checkpoints cannot store: it comes back as a string",
        text,
        kind,
    )


def key_of(part: str | int | tuple[Any, ...]) -> Any:
    """The key or index that a part, other than :data:`EMPTY`, stands for."""
    return part[0] if isinstance(part, tuple) else part


def name_of(path: KeyPath) -> str:
    """The stored name: the parts' texts, joined by dots."""
    return ".".join(
        str(part[-1]) if isinstance(part, tuple) else str(part) for part in path if part != EMPTY
    )


def empties(paths: Mapping[str, KeyPath]) -> Iterator[str]:
    """The names of empty dicts."""
    return (
        name for name, path in paths.items() if isinstance(path, tuple) and path[-1:] == (EMPTY,)
    )


def flatten(state: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """The values in ``state`` by the names that DCP gives them, in its order; and the paths of them and of empty dicts.

    Raises ValueError if two have one name, and RecursionError if a container contains itself.
    """
    values: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    _flatten(state, "", (), values, paths)
    return values, paths


def _flatten(
    container: Any, prefix: str, path: KeyPath, values: dict[str, Any], paths: dict[str, KeyPath]
) -> None:
    """Add what is in ``container``. Of what it holds, dicts are opened, and lists with a tensor or a dict in them."""
    is_mapping = isinstance(container, Mapping)
    keys: Iterable[Any] = container if is_mapping else range(len(container))
    held: Collection[Any] = container.values() if is_mapping else container
    if is_mapping and set(map(type, keys)) <= {str} and not _may_open(held):
        # The common case in a few C-level passes: a dict of tensors and numbers.
        names = [prefix + key for key in keys] if prefix else list(keys)
        if not paths.keys().isdisjoint(names):
            raise _name_is_taken(next(name for name in names if name in paths))
        values.update(zip(names, held, strict=True))
        paths.update(zip(names, [(*path, key) for key in keys], strict=True))
        return
    for key, value in zip(keys, held, strict=True):
        part, name = part_of(key) if is_mapping else key, f"{prefix}{key!s}"
        here = (*path, part)
        if isinstance(value, Mapping) and not value:
            here = (*here, EMPTY)
        elif isinstance(value, Mapping) or _opens(value):
            _flatten(value, f"{name}.", here, values, paths)
            continue
        else:
            values[name] = value
        if name in paths:
            raise _name_is_taken(name)
        paths[name] = here


def typed_paths(state: Mapping[Any, Any], paths: Mapping[str, KeyPath]) -> dict[str, KeyPath]:
    """DCP's ``paths`` of values in ``state``, with the types of keys; and the paths of empty dicts. Raises as
    :func:`flatten`.
    """
    _, typed = flatten(state)
    named = {name: typed.get(name, path) for name, path in paths.items()}
    return named | {name: typed[name] for name in empties(typed)}


def _may_open(values: Iterable[Any]) -> bool:
    return any(issubclass(kind, (Mapping, list)) for kind in set(map(type, values)))


def _opens(value: Any) -> bool:
    """Whether it is a list that DCP takes apart."""
    return isinstance(value, list) and any(
        isinstance(each, (Mapping, torch.Tensor)) or _opens(each) for each in value
    )


def _name_is_taken(name: str) -> ValueError:
    return ValueError(f"duplicated flatten key {name}")  # as DCP says it


def as_dcp_has_them(paths: Any) -> Any:
    """What DCP's planners are told of ``paths``: every key as a string, and no empty dicts."""
    if not isinstance(paths, dict) or not set(map(type, paths.values())) <= {tuple}:
        return paths
    if tuple not in set(map(type, chain.from_iterable(paths.values()))):
        return paths
    return {
        name: tuple(str(part[-1]) if isinstance(part, tuple) else part for part in path)
        for name, path in paths.items()
        if path[-1:] != (EMPTY,)
    }


# ---- paths from a file ---------------------------------------------------------------------------


_SPARE_LIST_ITEMS: Final = 1 << 24
"""How many list items in total ``planner_data`` may leave without a value (128 MiB). A planner that keeps other tuples
there does not reach this.
"""


def check_paths(planner_data: Any, entries: Iterable[str]) -> None:
    """The nested state is rebuilt from ``planner_data``: names' paths (``key_paths.py``), also of empty dicts.

    Rebuilding allocates a list up to its largest index, so a file's indices must be bounded. Other data of a planner
    are not checked.
    """
    if not isinstance(planner_data, dict):
        return
    paths = planner_data.values()
    if set(map(type, paths)) <= {tuple} and set(map(type, chain.from_iterable(paths))) <= {str}:
        return
    nodes: dict[tuple[str, int, object], int] = {}  # the tree of all paths: parent and key, number
    largest: dict[int, int] = {}
    indices = 0
    empty = [
        fqn for fqn, path in planner_data.items() if type(path) is tuple and path[-1:] == (EMPTY,)
    ]
    for fqn in chain(entries, empty):
        path = planner_data.get(fqn)
        if not isinstance(path, (tuple, list)):
            continue
        kinds = set(map(type, path))
        if kinds <= {str} or not any(issubclass(kind, (int, tuple)) for kind in kinds):
            continue
        if not kinds <= {str, int, tuple}:
            raise ValueRefused(f"the path of {described(fqn)} has a part that is no key or index")
        parent = 0
        for key in path[:-1] if path[-1] == EMPTY else path:
            if type(key) is int:
                if key < 0:
                    raise ValueRefused(f"the path of {described(fqn)} has a negative index")
                largest[parent] = max(largest.get(parent, 0), key)
            elif type(key) is tuple and not _is_key(key):
                raise ValueRefused(f"the path of {described(fqn)} has what is no key of a dict")
            # the key contains a string, so a file cannot predict its hash
            node = ("root", parent, key)
            if node not in nodes:
                nodes[node] = len(nodes) + 1
                indices += type(key) is int
            parent = nodes[node]
    if sum(largest.values(), len(largest)) > 16 * indices + _SPARE_LIST_ITEMS:
        raise ValueRefused("planner_data describe lists that are longer than what is in them")


def _is_key(part: tuple[Any, ...]) -> bool:
    """Whether it is a key of a dict that is no string, and perhaps its text."""
    try:
        hash(part)
    except TypeError:
        return False
    return len(part) == 1 or (len(part) == 2 and type(part[1]) is str)


# ---- nested states -------------------------------------------------------------------------------


def nested(values: Mapping[str, Any], paths: Mapping[str, KeyPath]) -> dict[str, Any]:
    """The values, nested by their paths, with the empty dicts that ``paths`` have, too.

    Raises :class:`CheckpointCorruptError` if a path leads through another value.
    """
    found: dict[str, Any] = {}
    for name in (*values, *(each for each in empties(paths) if each not in values)):
        path = path_of(name, paths)
        try:
            put(found, path, values.get(name), anew=True)
        except (TypeError, AttributeError) as error:
            raise CheckpointCorruptError(
                f"the metadata give {name!r} the path {path!r}, on which another value lies"
            ) from error
    for optimizer in list(_with_numbers_as_text(found)):
        optimizer["state"] = {int(key): value for key, value in optimizer["state"].items()}
    return found


def _with_numbers_as_text(found: Any) -> Iterator[dict[str, Any]]:
    """The states of ``Optimizer.state_dict()`` in which DCP has made strings of the parameters' numbers.

    The names of a model's parameters may be numbers, too; then the groups have strings.
    """
    if isinstance(found, dict):
        state, groups = found.get("state"), found.get("param_groups")
        if isinstance(state, dict) and state and isinstance(groups, list):
            params = [each.get("params") for each in groups if isinstance(each, dict)]
            numbers = {
                str(each)
                for some in params
                if isinstance(some, list)
                for each in some
                if type(each) is int
            }
            if state.keys() <= numbers:
                yield found
    if isinstance(found, (dict, list)):
        for value in found.values() if isinstance(found, dict) else found:
            yield from _with_numbers_as_text(value)


def path_of(name: str, paths: object) -> KeyPath:
    """The path that the save's planner stored for ``name``; the name itself, if it stored none."""
    path = paths.get(name) if isinstance(paths, dict) else None
    return path if isinstance(path, tuple) and path else (name,)


def put(root: dict[str, Any], path: KeyPath, value: Any, *, anew: bool = False) -> None:
    """Put ``value`` at ``path``. Makes the containers on the way; at the path of an empty dict, nothing else.

    Raises :class:`TypeError` or :class:`AttributeError` if another value lies on the way; with ``anew``, also if one
    lies at the end.
    """
    container: Any = root
    for part, following in zip(path, (*path[1:], None), strict=True):
        if part == EMPTY:
            return
        key = key_of(part)
        if isinstance(part, int):
            container.extend([None] * (part + 1 - len(container)))
            present = container[key]
        else:
            present = container.get(key)
        if following is None:
            if anew and present is not None:
                raise TypeError("there is a value already")
            container[key] = value
        elif present is None or (not anew and _is_other_and_empty(present, following)):
            present = container[key] = [] if isinstance(following, int) else {}
        container = present


def _is_other_and_empty(present: Any, following: object) -> bool:
    """Whether an empty list of the program is there, where a dict was saved, or the reverse."""
    other = dict if isinstance(following, int) else list
    return isinstance(present, other) and not present
