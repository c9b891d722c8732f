"""Nested values, as tensors by path and one small Python value that says how they were nested: keys and containers come
back with their types. Optimizers are stored so.

The small value consists of tuples, which DCP stores as they are::

    ("dict", ((0, ("tensor", "mats.0")), (1, ("tensor", "mats.1"))))
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
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


def packed_optimizer(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What ``state_dict()`` of the optimizer gave, with numbers for parameters.

    Args:
        stored: The nested state that is stored of the optimizer (``optimizers.py``). The tensors in it are returned.
    """
    found: dict[str, Any] = {}
    if "rest" in stored:
        found = put_together(stored["rest"]["structure"], lambda path, *_: stored["rest"][path])
    if "groups" not in stored:
        return found
    values = stored["groups"]
    numbers = itertools.count()
    number_of: dict[str, int] = {}
    param_groups = []
    groups = {ident: value for ident, value in values.items() if isinstance(value, tuple)}
    for ident, (_, names, structure, _) in sorted(groups.items(), key=lambda each: each[1][-1]):
        number_of.update(zip(names, numbers, strict=False))
        settings = put_together(structure, lambda path, *_, of=ident: values[f"{of}.{path}"])
        param_groups.append({**settings, "params": [number_of[name] for name in names]})
    nested = dict(itertools.chain.from_iterable(stored.get("nested", {}).values()))
    states: dict[Any, Any] = {}
    for name, number in number_of.items():
        tensors = stored.get("state", {}).get(name, {})
        if name in nested:
            states[number] = put_together(nested[name], lambda path, *_, of=tensors: of[path])
        elif tensors:
            states[number] = dict(tensors)
    found["state"] = {**found.get("state", {}), **states}
    found["param_groups"] = param_groups
    return found
