"""The state of an optimizer in three forms: by names of parameters; as ``state_dict()`` gives it, by numbers; and as it
is stored. Below an optimizer's name lie

* ``state.<parameter>.<key>``: the tensors of its state;
* ``groups.<first parameter>.<digest>``: for each group a small Python value with the optimizer's class, the names of
  the parameters, the settings (``lr`` …), and its position. So the stages of a pipeline do not collide, and replicas
  agree;
* ``nested.…``, of a group: how those states were nested that are not just tensors by strings (``structure.py``);
* ``params.<position>``: the parameters that are in no model, such as fp32 masters;
* ``rest``: what else ``state_dict()`` gave.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch

from dcp_datastates.format.structure import Structure, put_together, taken_apart

_PLAIN: Final = frozenset({torch.Tensor})
_NO_SETTINGS: Final = frozenset({"params", "param_names"})


@dataclass
class Group:
    """Parameters with common settings."""

    kind: str
    """The optimizer's class."""
    names: tuple[str, ...]
    settings: dict[str, Any]


@dataclass
class OptimizerState:
    """The state of an optimizer, by names of parameters."""

    groups: list[Group] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)
    """The states of parameters that have some."""
    rest: dict[str, Any] = field(default_factory=dict)
    """What ``state_dict()`` gives beside these; all, if it does not number the parameters as torch's does."""

    @staticmethod
    def of_packed(packed: Mapping[str, Any], names: Sequence[str], kind: str) -> OptimizerState:
        """Of what ``state_dict()`` of an optimizer of this ``kind`` gives. ``names``: of its parameters, in their
        order; they may stand in place of the numbers.
        """
        found = OptimizerState(rest=dict(packed))
        groups, states = packed.get("param_groups"), packed.get("state")
        if not isinstance(groups, list) or not isinstance(states, Mapping):
            return found
        numbers = list(chain.from_iterable(group["params"] for group in groups))
        if numbers not in (list(range(len(names))), list(names)):
            return found
        name_of = dict(zip(numbers, names, strict=True))
        others = {key: each for key, each in states.items() if key not in name_of}
        found.states = {
            name: each
            for number, name in name_of.items()
            if type(each := states.get(number, {})) is not dict or each
        }
        del found.rest["param_groups"], found.rest["state"]
        if others:
            found.rest["state"] = others
        for group in groups:
            settings = {key: each for key, each in group.items() if key not in _NO_SETTINGS}
            found.groups.append(
                Group(kind, tuple(name_of[number] for number in group["params"]), settings)
            )
        return found

    def packed(self, *, by_name: bool = False) -> dict[str, Any]:
        """What ``state_dict()`` gives, with numbers for parameters, or ``by_name``, as torch's functions have it."""
        if not self.groups:
            return dict(self.rest)
        names = chain.from_iterable(group.names for group in self.groups)
        numbers = {name: name if by_name else number for number, name in enumerate(names)}
        states = {numbers[name]: self.states[name] for name in numbers if name in self.states}
        groups = [
            {**group.settings, "params": [numbers[name] for name in group.names]}
            for group in self.groups
        ]
        state = {**self.rest.get("state", {}), **states}
        return {**self.rest, "state": state, "param_groups": groups}

    @staticmethod
    def of_stored(
        stored: Mapping[str, Any], renamed: Callable[[str], str] = str, *, in_part: bool = False
    ) -> OptimizerState:
        """Of the nested values that are stored; their tensors are those of the result.

        Args:
            renamed: gives the program's name of a stored parameter. ``state`` has those names already.
            in_part: whether tensors may lack. A nested state that lacks one is left out.
        """
        found = OptimizerState()
        nested, states = nested_states(stored, renamed), stored.get("state", {})
        for name in dict.fromkeys([*nested, *states]):
            tensors = states.get(name, {})
            try:
                found.states[name] = (
                    _whole(nested[name], tensors) if name in nested else dict(tensors)
                )
            except KeyError:
                if not in_part:
                    raise
        values = stored.get("groups", {})
        groups = {ident: each for ident, each in values.items() if isinstance(each, tuple)}
        for ident, (kind, names, structure, _) in sorted(groups.items(), key=lambda g: g[1][-1]):
            settings = _whole(structure, values, f"{ident}.")
            found.groups.append(Group(kind, tuple(map(renamed, names)), settings))
        if "structure" in (rest := stored.get("rest", {})):
            found.rest = _whole(rest["structure"], rest)
        return found

    def stored(self, note: Callable[[str, torch.Tensor], Any]) -> dict[str, Any]:
        """The nested values to store, but for the parameters. ``note`` says what is to be known of a tensor of a
        parameter before it is there.
        """
        found: dict[str, Any] = {"state": {}, "groups": {}, "nested": {}}
        are_flat = _are_flat(self.states)
        for number, group in enumerate(group for group in self.groups if group.names):
            ident = _ident(group.names)
            tensors, structure = taken_apart(group.settings)
            found["groups"][ident] = group.kind, group.names, structure, number
            found["groups"].update({f"{ident}.{key}": each for key, each in tensors.items()})
            nested = []
            for name in () if are_flat else filter(self.states.__contains__, group.names):
                values = self.states[name]
                its_note = functools.partial(note, name)
                if _is_flat(values, its_note):
                    found["state"][name] = values
                    continue
                found["state"][name], structure = taken_apart(values, note=its_note)
                nested.append((name, structure))
            if nested:
                found["nested"][ident] = tuple(nested)
        if are_flat:
            found["state"] = self.states
        if self.rest:
            tensors, structure = taken_apart(self.rest, "tensors")
            found["rest"] = {"structure": structure, **tensors}
        return {key: each for key, each in found.items() if each}


def nested_states(
    stored: Mapping[str, Any], renamed: Callable[[str], str] = str
) -> dict[str, Structure]:
    """The structures of the states that are not flat, by the program's names of parameters."""
    of_groups = chain.from_iterable(stored.get("nested", {}).values())
    return {renamed(name): structure for name, structure in of_groups}


def packed_optimizer(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What ``state_dict()`` of the optimizer gave of which this is stored, nested."""
    return OptimizerState.of_stored(stored).packed()


@functools.lru_cache(maxsize=256)
def _ident(names: tuple[str, ...]) -> str:
    """The first parameter, and a digest of all: groups of two ranks may have the same first one."""
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=4)
    return f"{names[0]}.{digest.hexdigest()}"


def _are_flat(states: Mapping[str, Any]) -> bool:
    """Whether all are dicts of plain tensors by strings, as they most often are."""
    return (
        set(map(type, states.values())) <= {dict}
        and set(map(type, set().union(*states.values()))) <= {str}
        and set(map(type, chain.from_iterable(map(dict.values, states.values())))) <= _PLAIN
    )


def _is_flat(values: Any, note: Callable[[torch.Tensor], Any]) -> bool:
    """Whether a state needs no structure: tensors by strings, of which nothing is to be known."""
    return (
        type(values) is dict
        and set(map(type, values)) <= {str}
        and all(isinstance(each, torch.Tensor) and note(each) is None for each in values.values())
    )


def _whole(structure: Structure, tensors: Mapping[str, Any], start: str = "") -> Any:
    """The value of ``structure``, of the ``tensors`` that lie below ``start``."""
    return put_together(structure, lambda path, *_: tensors[f"{start}{path}"])
