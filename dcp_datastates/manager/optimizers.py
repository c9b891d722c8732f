"""Optimizers, as objects that DCP saves and loads: state and settings by the names of parameters.

Below an optimizer's name lie

* ``state.<parameter>.<key>``: the tensors of its state;
* ``groups.<first parameter>.<digest>``: for each group a small Python value with the optimizer's class, the names of
  the parameters, the settings (``lr`` …), and its position. So the stages of a pipeline do not collide, and replicas
  agree;
* ``nested.…``, of a group: how those states were nested that are not just tensors by strings (``structure.py``);
* ``params.<position>``: the parameters that are in no model, such as fp32 masters;
* ``rest``: what else ``state_dict()`` gave.

A load makes the tensors as they were stored, and reads them in place; nothing takes a step. A state of a parameter that
no rank's optimizer has is not read, so the load is refused by name.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final

import torch

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.stored_names import is_under
from dcp_datastates.format.structure import Structure, put_together, taken_apart
from dcp_datastates.loading.fit import Fit
from dcp_datastates.loading.stored import Stored
from dcp_datastates.manager.live_optimizer import (
    Group,
    LiveOptimizer,
    Places,
    placements_of,
)

logger = logging.getLogger(__name__)

_PLAIN: Final = frozenset({torch.Tensor})
_SMALL: Final = ("groups.", "nested.", "rest.structure")

Read = Callable[[Stored, Collection[str]], dict[str, Any]]
"""Reads stored Python values, by their stored names."""


@dataclass
class _Loading:
    """What is to be given to an optimizer. The load fills the tensors in it."""

    live: LiveOptimizer
    groups: list[Group] = field(default_factory=list)
    """As stored, with the program's names."""
    states: dict[str, Any] = field(default_factory=dict)
    """By the program's names of parameters."""
    rest: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerPart:
    """An optimizer, by its ``name`` in the state. Parameters of which a loaded state has none have none afterwards."""

    name: str
    optimizer: torch.optim.Optimizer
    models: Mapping[str, Sequence[torch.nn.Module]]
    """The models of the state, each as its parts."""
    rank: int | None = None
    """This rank, if there are several."""
    fit: Fit | None = None
    """What to take of the checkpoint to load; None for a save."""
    renamed: Callable[[str], str] = str
    """Gives the program's name of a stored parameter."""
    _places: dict[str, Any] = field(default_factory=dict)
    """What a load fills, by the names below the optimizer's."""
    _loading: _Loading | None = None

    def live(self) -> LiveOptimizer:
        """The optimizer as it is now."""
        return LiveOptimizer(self.optimizer, self.models, self.rank, to_fill=self.fit is not None)

    # ---- saving --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state to save. For a load: what :meth:`lay_out` has made."""
        if self.fit is not None:
            return self._places
        live = self.live()
        found: dict[str, Any] = {"state": {}, "groups": {}, "nested": {}}
        for number, group in enumerate(group for group in live.groups if group.names):
            tensors, structure = taken_apart(group.settings)
            found["groups"][group.ident] = group.kind, group.names, structure, number
            found["groups"].update({f"{group.ident}.{key}": each for key, each in tensors.items()})
            if _are_flat(group.states):
                found["state"].update(group.states)
                continue
            nested = []
            for name, values in group.states.items():
                if _is_flat(values, live.names.parameters[name]):
                    found["state"][name] = values
                    continue
                note = partial(placements_of, like=live.names.parameters[name])
                found["state"][name], structure = taken_apart(values, note=note)
                nested.append((name, structure))
            if nested:
                found["nested"][group.ident] = tuple(nested)
        found["params"] = {name: live.names.parameters[name] for name in live.names.unnamed}
        if live.rest:
            tensors, structure = taken_apart(live.rest, "tensors")
            found["rest"] = {"structure": structure, **tensors}
        return {key: each for key, each in found.items() if each}

    # ---- loading -------------------------------------------------------------------------------

    def lay_out(self, names: Mapping[str, str], stored: Stored, read: Read) -> None:
        """Make places for what is stored, before anything is changed.

        Args:
            names: the stored names to load, by the program's.
            stored: what is stored, by its names.
            read: reads small Python values.

        Raises :class:`IncompatibleStateError` if the stored state is that of another optimizer.
        """
        assert self.fit is not None
        start = f"{self.name}."
        mine = {n.removeprefix(start): old for n, old in names.items() if n.startswith(start)}
        live = self.live()
        self._places, self._loading = {}, None
        if not mine:
            first = next(iter(live.names.parameters), None)
            if first is not None and self.fit.takes(f"{start}groups.{first}"):
                self._places[f"groups.{first}"] = None  # which is then missing
            return
        if any(name.startswith("param_groups.") for name in mine):
            raise self._unfit(
                f"was saved as state_dict() or torch's get_state_dict() gives it: load() returns it, for "
                f"load_state_dict() or set_state_dict(); exclude='{start}param_groups' keeps the program's settings"
            )
        small = {
            name: old
            for name, old in mine.items()
            if name.startswith(_SMALL) and stored.get(old) is None
        }
        found = read(stored, small.values())
        values = {name: found[old] for name, old in small.items()}
        nested: dict[str, Structure] = {
            self.renamed(name): structure
            for section, structures in values.items()
            if section.startswith("nested.")
            for name, structure in structures
        }
        tensors: dict[str, dict[str, Any]] = {name: {} for name in nested}
        places = Places(live, names, stored, nested)
        wrappers = frozenset(stored.wrappers)
        for name, old in mine.items():
            if is_under(old, wrappers) and old not in wrappers:
                continue  # a part, which is read into its wrapper
            kind, _, rest = name.partition(".")
            if name in values:
                self._places[name] = values[name]
            elif kind == "state":
                parameter, path = places.split(rest)
                if parameter is not None:  # else another rank's, or the reader says so
                    place = places.place(parameter, path, stored.get(old))
                    self._places[name] = tensors.setdefault(parameter, {})[path] = place
            elif kind != "params":
                self._places[name] = stored.new(old)
            elif rest in live.names.parameters:
                self._places[name] = live.names.parameters[rest]
        self._loading = self._loading_of(live, values, nested, tensors)
        self._check(self._loading, any(name.startswith("state.") for name in mine))

    def _loading_of(
        self,
        live: LiveOptimizer,
        values: Mapping[str, Any],
        nested: Mapping[str, Structure],
        tensors: Mapping[str, dict[str, Any]],
    ) -> _Loading:
        """Put together what was taken apart for the save: ``values`` by their names, and ``tensors`` by parameters."""
        found = _Loading(live)
        for name, mine in tensors.items():
            structure = nested.get(name)
            with contextlib.suppress(KeyError):  # a tensor of it is another rank's, or left out
                found.states[name] = mine if structure is None else _whole(structure, mine)
        for section, value in values.items():
            if section.startswith("groups."):
                kind, names, structure, _ = value
                settings = _whole(structure, self._places, f"{section}.")
                found.groups.append(Group(kind, tuple(map(self.renamed, names)), settings))
        if (structure := values.get("rest.structure")) is not None:
            found.rest = _whole(structure, self._places, "rest.")
        return found

    def _check(self, loading: _Loading, moments: bool) -> None:
        """Raise :class:`IncompatibleStateError` if the stored state can be of no use to this optimizer. ``moments``:
        whether states of parameters are to be loaded.
        """
        ours, live = type(self.optimizer), loading.live
        whole = "param_groups" in loading.rest
        if (loading.groups or whole) and bool(live.groups) == whole:
            raise self._unfit(f"is of another kind than what {ours.__qualname__} gives")
        for group in loading.groups if moments else ():
            known = {*self.optimizer.defaults, *live.groups[0].settings}
            keys = group.settings.keys()
            if group.kind != ours.__qualname__ and not (keys <= known or known <= keys):
                raise self._unfit(
                    f"is that of {group.kind}, and the program has {ours.__qualname__}"
                )
        names = [name for group in loading.groups for name in group.names] if moments else []
        if issubclass(ours, torch.optim.LBFGS) and names and names != list(live.names.parameters):
            raise self._unfit(
                "is of all parameters together, and these have other names or another order now"
            )

    def _unfit(self, reason: str) -> IncompatibleStateError:
        return IncompatibleStateError(
            f"the state of the optimizer {self.name!r} {reason}; exclude={self.name!r} begins anew"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the optimizer what was loaded."""
        loading, self._loading = self._loading, None
        if loading is None:
            return  # nothing of it was to be loaded
        live = loading.live
        given = {
            name: self._with_excluded(name, live.states.get(name), loading.states.get(name))
            for name in live.names.parameters
        }
        settings = [self._settings(group, loading.groups) for group in live.groups]
        live.give({name: each for name, each in given.items() if each}, settings, loading.rest)
        had = {name for group in loading.groups for name in group.names}
        if had and (new := [name for name in live.names.parameters if name not in had]):
            logger.warning(
                "%s: the optimizer had no state of %d of its parameters at the save (they were frozen, or tied to "
                "others), and begins anew with them: %s",
                self.name,
                len(new),
                some_of(new),
            )

    def _with_excluded(self, name: str, mine: Any, loaded: Any) -> Any:
        """What a parameter has after the load: what is stored, and what it has under names that are left out."""
        if not isinstance(mine, Mapping) or not self.optimizer.state:
            return loaded
        assert self.fit is not None
        takes = self.fit.takes
        left = {k: v for k, v in mine.items() if not takes(f"{self.name}.state.{name}.{k}")}
        return {**left, **(loaded or {})} if left else loaded

    def _settings(self, own: Group, groups: Sequence[Group]) -> dict[str, Any]:
        """The settings of one of the optimizer's groups: what its parameters had, where they agree."""
        wanted = frozenset(own.names)
        sources = [group.settings for group in groups if not wanted.isdisjoint(group.names)]
        found: dict[str, Any] = {}
        for key in dict.fromkeys(chain.from_iterable(sources)):
            first, *others = [source[key] for source in sources if key in source]
            if all(_same(first, each) for each in others):
                found[key] = _like(own.settings.get(key), first)
            else:
                logger.warning(
                    "%s: the group of %r keeps its %s, as its parameters were saved in groups with different ones",
                    self.name,
                    own.names[0],
                    key,
                )
        lacking = own.settings.keys() - chain.from_iterable(sources) if sources else ()
        if lacking:
            text = "%s: the group of %r keeps its %s: the checkpoint has none"
            logger.info(text, self.name, own.names[0], ", ".join(sorted(map(str, lacking))))
        return found


def _are_flat(states: Mapping[str, Any]) -> bool:
    """Whether all are dicts of plain tensors by strings, as they most often are."""
    return (
        set(map(type, states.values())) <= {dict}
        and set(map(type, set().union(*states.values()))) <= {str}
        and set(map(type, chain.from_iterable(map(dict.values, states.values())))) <= _PLAIN
    )


def _is_flat(values: Any, parameter: torch.Tensor | None) -> bool:
    """Whether a state needs no structure: tensors by strings, which look as their parameter says."""
    return (
        type(values) is dict
        and set(map(type, values)) <= {str}
        and all(
            isinstance(each, torch.Tensor) and placements_of(each, like=parameter) is None
            for each in values.values()
        )
    )


def _whole(structure: Structure, tensors: Mapping[str, Any], start: str = "") -> Any:
    """The value of ``structure``, of the ``tensors`` that lie below ``start``."""
    return put_together(structure, lambda path, *_: tensors[f"{start}{path}"])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(_like(0.0, one) == _like(0.0, other))


def _like(own: Any, stored: Any) -> Any:
    """A setting as a number if the program has a number. (Of a tensor, :class:`LiveOptimizer` takes the value.)"""
    if isinstance(stored, torch.Tensor) and not isinstance(own, torch.Tensor) and own is not None:
        return stored.item() if stored.numel() == 1 else stored
    return stored
