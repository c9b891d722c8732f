"""The stored state of an optimizer, as its ``state_dict()`` gave it: for programs that know no names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from dcp_datastates.manager.structure import put_together


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
