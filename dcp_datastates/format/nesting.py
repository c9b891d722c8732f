"""Nested states, built from values and the paths under which they were saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from dcp_datastates.errors import CheckpointCorruptError
from dcp_datastates.format.key_paths import EMPTY, KeyPath, empties, key_of, with_types

_MOST_SKIPPED: Final = 1 << 20
"""Elements of a list that a checkpoint may lack before one that it has."""


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
    paths = with_types(paths)
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
            if not 0 <= part <= len(container) + _MOST_SKIPPED:
                raise TypeError("no index into a list")
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
