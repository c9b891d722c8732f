"""Nested values, as tensors by path and one small Python value that says how they were nested: keys and containers come
back with their types. Optimizers are stored so (``optimizer_state.py``).

The small value consists of tuples, which DCP stores as they are::

    ("dict", ((0, ("tensor", "mats.0")), (1, ("tensor", "mats.1"))))
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch

Structure = tuple[Any, ...]
"""How a value was nested."""

_CONTAINERS: Final[dict[str, Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "list": list,
    "tuple": tuple,
}
_NAMES: Final = {container: name for name, container in _CONTAINERS.items()}


def taken_apart(
    value: Any, path: str = "", note: Callable[[torch.Tensor], Any] = lambda tensor: None
) -> tuple[dict[str, torch.Tensor], Structure]:
    """The tensors in ``value`` by path, below ``path``, and its structure. Paths consist of keys and dots.

    Dicts, ``OrderedDict``s, lists and tuples are opened; anything else that is no tensor is part of the structure, as
    it is. ``note`` says what is to be known of a tensor before it is there.
    """
    tensors: dict[str, torch.Tensor] = {}

    def look(value: Any, path: str) -> Structure:
        if isinstance(value, torch.Tensor):
            while path in tensors:  # keys such as 1 and "1"
                path += "'"
            tensors[path] = value
            noted = note(value)
            return ("tensor", path) if noted is None else ("tensor", path, noted)
        name = _NAMES.get(type(value))
        start = f"{path}." if path else ""
        if name is None:
            return "value", value
        if isinstance(value, dict):
            return name, tuple((key, look(each, f"{start}{key}")) for key, each in value.items())
        return name, tuple(look(each, f"{start}{n}") for n, each in enumerate(value))

    return tensors, look(value, path)


def put_together(structure: Structure, tensor: Callable[..., Any]) -> Any:
    """The value of ``structure``: ``tensor`` gives the tensor at a path, and takes what was noted of it, too."""
    kind, inner = structure[0], structure[1]
    if kind == "tensor":
        return tensor(*structure[1:])
    container = _CONTAINERS.get(kind)
    if container is None:
        return inner
    if issubclass(container, dict):
        return container((key, put_together(each, tensor)) for key, each in inner)
    return container(put_together(each, tensor) for each in inner)
