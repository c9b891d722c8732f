"""Nested states, built from values and the paths under which they were saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dcp_datastates.errors import CheckpointCorruptError
from dcp_datastates.format.name_patterns import KeyPath

__all__ = ["nested", "path_of", "put"]

_MOST_SKIPPED: Final = 1 << 20
"""Elements of a list that a checkpoint may lack before one that it has."""


def nested(values: Mapping[str, Any], paths: object) -> dict[str, Any]:
    """The values, nested by the ``paths`` that the save's planner stored.

    Raises :class:`CheckpointCorruptError` if a path leads through another value.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = path_of(name, paths)
        try:
            put(found, path, value, anew=True)
        except (TypeError, AttributeError) as error:
            raise CheckpointCorruptError(
                f"the metadata give {name!r} the path {path!r}, on which another value lies"
            ) from error
    return found


def path_of(name: str, paths: object) -> KeyPath:
    """The path that the save's planner stored for ``name``; the name itself, if it stored none."""
    path = paths.get(name) if isinstance(paths, dict) else None
    return path if isinstance(path, tuple) and path else (name,)


def put(root: dict[str, Any], path: KeyPath, value: Any, *, anew: bool = False) -> None:
    """Put ``value`` at ``path``: an integer key is an index into a list. Makes the containers on the way.

    Raises :class:`TypeError` or :class:`AttributeError` if another value lies on the way; with ``anew``, also if one
    lies at the end.
    """
    container: Any = root
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(key, int):
            if not 0 <= key <= len(container) + _MOST_SKIPPED:
                raise TypeError("no index into a list")
            container.extend([None] * (key + 1 - len(container)))
            present = container[key]
        else:
            present = container.get(key)
        if following is None:
            if anew and present is not None:
                raise TypeError("there is a value already")
            container[key] = value
        elif present is None:
            present = container[key] = [] if isinstance(following, int) else {}
        container = present
