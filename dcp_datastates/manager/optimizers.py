"""Optimizers, as objects that DCP saves and loads: state and settings by the names of parameters.

Below an optimizer's name lie

* ``state.<parameter>.<key>``: the tensors of its state;
* ``groups.<first parameter>.<digest>``: for each group a small Python value with the optimizer's class, the names of
  the parameters, the settings (``lr`` …), and its position. So the stages of a pipeline do not collide, and replicas
  agree;
* ``nested.…``, of a group: how those states were nested that are not just tensors by strings (``structure.py``);
* ``params.<position>``: the parameters that are in no model, such as fp32 masters;
* ``rest``: what else ``state_dict()`` gave.

A load makes the tensors as they were stored, and reads them in place; nothing takes a step. What belongs to a parameter
of the model that the optimizer does not have (any more) is kept with the optimizer, for the next save, and for the time
when it has the parameter again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.contents import some_of
from dcp_datastates.loading.fit import Fit
from dcp_datastates.loading.stored import Stored
from dcp_datastates.manager.live_optimizer import LiveOptimizer, Places, placements_of
from dcp_datastates.manager.structure import Structure, put_together, taken_apart

logger = logging.getLogger(__name__)

_PLAIN: Final = frozenset({torch.Tensor})
_SMALL: Final = ("groups.", "nested.", "rest.structure")

Read = Callable[[Stored, Collection[str]], dict[str, Any]]
"""Reads stored Python values, by their stored names."""


@dataclass
class _Group:
    """Parameters with common settings, and their states."""

    kind: str
    """The optimizer's class."""
    names: tuple[str, ...]
    settings: dict[str, Any]
    states: dict[str, Any] = field(default_factory=dict)

    @property
    def ident(self) -> str:
        """The first parameter, and a digest of all: groups of two ranks may have the same first one."""
        return _ident(self.names)


@functools.lru_cache(maxsize=256)
def _ident(names: tuple[str, ...]) -> str:
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=4)
    return f"{names[0]}.{digest.hexdigest()}"


@dataclass(frozen=True)
class _Stored:
    """A group of the checkpoint to load."""

    kind: str
    ident: str
    names: tuple[str, ...]
    """The program's names of its parameters."""
    settings: Structure

    @property
    def keys(self) -> set[Any]:
        """Those of the settings."""
        return {key for key, _ in self.settings[1]}


class _Kept(NamedTuple):
    """What was restored of parameters that an optimizer does not have: for the next save, and for the time when the
    optimizer has them.
    """

    groups: list[_Group]
    parameters: dict[torch.Tensor, str]
    """The names of those that the optimizer has not been given again yet."""


_kept: MutableMapping[torch.optim.Optimizer, _Kept] = WeakKeyDictionary()


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
    renamed: Callable[[str], str] | None = None
    """Gives the program's name of a stored parameter. None: they are the same."""
    _template: dict[str, Any] = field(default_factory=dict)
    _stored: list[_Stored] = field(default_factory=list)
    _nested: dict[str, Structure] = field(default_factory=dict)
    """The structures of stored states, by the program's names of parameters."""
    _rest: Structure | None = None

    def live(self) -> LiveOptimizer:
        """The optimizer as it is now."""
        if self.fit is None:
            _give_added(self.optimizer)
        return LiveOptimizer(self.optimizer, self.models, self.rank, to_fill=self.fit is not None)

    # ---- saving --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state to save. For a load: what :meth:`lay_out` has made."""
        if self.fit is not None:
            return self._template
        live = self.live()
        parameters = {**live.elsewhere, **live.parameters}
        found: dict[str, Any] = {"state": {}, "groups": {}, "nested": {}}
        for number, group in enumerate([*self._groups_of(live), *self._kept_of(live)]):
            tensors, structure = taken_apart(group.settings)
            found["groups"][group.ident] = group.kind, group.names, structure, number
            found["groups"].update({f"{group.ident}.{key}": each for key, each in tensors.items()})
            if _are_flat(group.states):
                found["state"].update(group.states)
                continue
            nested = []
            for name, values in group.states.items():
                if _is_flat(values, parameters.get(name)):
                    found["state"][name] = values
                    continue
                note = partial(placements_of, like=parameters.get(name))
                found["state"][name], structure = taken_apart(values, note=note)
                nested.append((name, structure))
            if nested:
                found["nested"][group.ident] = tuple(nested)
        found["params"] = {name: live.parameters[name] for name in live.unnamed}
        if live.rest:
            tensors, structure = taken_apart(live.rest, "tensors")
            found["rest"] = {"structure": structure, **tensors}
        return {key: each for key, each in found.items() if each}

    def _groups_of(self, live: LiveOptimizer) -> list[_Group]:
        kind = type(self.optimizer).__qualname__
        return [
            _Group(
                kind, tuple(names), settings, {n: live.states[n] for n in names if n in live.states}
            )
            for names, settings in live.groups
            if names
        ]

    def _kept_of(self, live: LiveOptimizer) -> list[_Group]:
        """What is kept of parameters that the optimizer still does not have."""
        found = []
        kept = _kept.get(self.optimizer)
        for group in () if kept is None else kept.groups:
            names = tuple(name for name in group.names if name in live.elsewhere)
            states = {name: group.states[name] for name in names if name in group.states}
            if states:
                found.append(_Group(group.kind, names, group.settings, states))
        return found

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
        self._template, self._stored, self._nested, self._rest = {}, [], {}, None
        if not mine:
            first = next(iter(live.parameters), None)
            if first is not None and self.fit.takes(f"{start}groups.{first}"):
                self._template["groups"] = {first: None}  # which is then missing
            return
        small = {
            name: old
            for name, old in mine.items()
            if name.startswith(_SMALL) and stored.get(old) is None
        }
        found = read(stored, small.values())
        values = {name: found[old] for name, old in small.items()}
        self._take(values)
        self._check(live, mine)
        places = Places(live, names, stored, self._nested)
        for name, old in mine.items():
            kind, _, rest = name.partition(".")
            if name in values:
                self._put(values[name], kind, rest)
            elif kind == "state":
                parameter, path = places.split(rest)
                if parameter is not None:  # else another rank's, or the reader says so
                    self._put(
                        places.of_state(parameter, path, stored.get(old)), kind, parameter, path
                    )
            elif kind == "params":
                if rest in live.parameters:
                    self._put(live.parameters[rest], kind, rest)
            else:
                self._put(places.plain(stored.get(old)), kind, rest)

    def _put(self, place: Any, kind: str, *path: str) -> None:
        *before, last = path
        container = self._template.setdefault(kind, {})
        for key in before:
            container = container.setdefault(key, {})
        container[last] = place

    def _take(self, values: Mapping[str, Any]) -> None:
        renamed = self.renamed or (lambda name: name)
        self._rest = values.get("rest.structure")
        for name, value in values.items():
            section, _, ident = name.partition(".")
            if section == "groups":
                kind, names, settings, _ = value
                self._stored.append(_Stored(kind, ident, tuple(map(renamed, names)), settings))
            elif section == "nested":
                self._nested.update({renamed(name): each for name, each in value})

    def _check(self, live: LiveOptimizer, mine: Iterable[str]) -> None:
        """Raise :class:`IncompatibleStateError` if the stored state can be of no use to this optimizer."""
        ours, moments = type(self.optimizer), any(name.startswith("state.") for name in mine)
        whole = self._rest is not None and any(key == "param_groups" for key, _ in self._rest[1])
        if (self._stored or whole) and bool(live.groups) == whole:
            raise self._unfit(f"is of another kind than what {ours.__qualname__} gives")
        if not moments:
            return
        for group in self._stored:
            known = {*self.optimizer.defaults, *live.groups[0][1]}
            if group.kind != ours.__qualname__ and not (group.keys <= known or known <= group.keys):
                raise self._unfit(
                    f"is that of {group.kind}, and the program has {ours.__qualname__}"
                )
        names = [name for group in self._stored for name in group.names]
        if issubclass(ours, torch.optim.LBFGS) and names and names != list(live.parameters):
            raise self._unfit(
                "is of all parameters together, and these have other names or another order now"
            )

    def _unfit(self, reason: str) -> IncompatibleStateError:
        return IncompatibleStateError(
            f"the state of the optimizer {self.name!r} {reason}; exclude={self.name!r} begins anew"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the optimizer a loaded state."""
        if not (self._stored or self._nested or self._rest or state.get("state")):
            return  # nothing of it was to be loaded
        live = self.live()
        tensors = state.get("state", {})
        loaded = {name: dict(each) for name, each in tensors.items() if name not in self._nested}
        for name, structure in self._nested.items():
            loaded[name] = put_together(structure, _found_in(tensors.get(name, {})))
        given = {
            name: self._with_excluded(name, live, loaded.get(name)) for name in live.parameters
        }
        rest: dict[str, Any] = {}
        if self._rest:
            others = state["rest"]
            rest = put_together(self._rest, _found_in(others))
        groups = [self._settled(group, state["groups"]) for group in self._stored]
        settings = [self._settings(names, own, groups) for names, own in live.groups]
        live.give({name: each for name, each in given.items() if each}, settings, rest)
        self._keep(live.elsewhere, groups, loaded)
        had = {name for group in self._stored for name in group.names}
        if had and (new := [name for name in live.parameters if name not in had]):
            logger.warning(
                "%s: the optimizer had no state of %d of its parameters at the save (they were frozen, or tied to "
                "others), and begins anew with them: %s",
                self.name,
                len(new),
                some_of(new),
            )

    def _with_excluded(self, name: str, live: LiveOptimizer, loaded: Any) -> Any:
        """What a parameter has after the load: what is stored, and what it has under names that are left out."""
        assert self.fit is not None
        mine = live.states.get(name)
        if not isinstance(mine, Mapping):
            return loaded
        takes = self.fit.takes
        left = {k: v for k, v in mine.items() if not takes(f"{self.name}.state.{name}.{k}")}
        return {**left, **(loaded or {})} if left else loaded

    @staticmethod
    def _settled(group: _Stored, tensors: Mapping[str, Any]) -> _Group:
        settings = put_together(group.settings, _found_in(tensors, f"{group.ident}."))
        return _Group(group.kind, group.names, settings)

    def _settings(
        self, names: Sequence[str], own: Mapping[str, Any], groups: Sequence[_Group]
    ) -> dict[str, Any]:
        """The settings of one of the optimizer's groups: what its parameters had, where they agree."""
        wanted = frozenset(names)
        sources = [group.settings for group in groups if not wanted.isdisjoint(group.names)]
        found: dict[str, Any] = {}
        for key in dict.fromkeys(key for source in sources for key in source):
            first, *others = [source[key] for source in sources if key in source]
            if all(_same(first, each) for each in others):
                found[key] = _like(own.get(key), first)
            else:
                logger.warning(
                    "%s: the group of %r keeps its %s, as its parameters were saved in groups with different ones",
                    self.name,
                    names[0],
                    key,
                )
        if sources and (
            lacking := [key for key in own if not any(key in each for each in sources)]
        ):
            text, settings = (
                "%s: the group of %r keeps its %s: the checkpoint has none",
                map(str, lacking),
            )
            logger.info(text, self.name, names[0], ", ".join(settings))
        return found

    def _keep(
        self,
        elsewhere: Mapping[str, torch.Tensor],
        groups: Sequence[_Group],
        loaded: Mapping[str, Any],
    ) -> None:
        kept, names = [], {name: elsewhere[name] for name in loaded if name in elsewhere}
        for group in groups:
            mine = tuple(name for name in group.names if name in names)
            if mine:
                states = {name: loaded[name] for name in mine}
                kept.append(_Group(group.kind, mine, group.settings, states))
        if kept and self.optimizer not in _kept:
            self.optimizer.register_step_pre_hook(_give_added)
        if kept or self.optimizer in _kept:
            _kept[self.optimizer] = _Kept(kept, {each: name for name, each in names.items()})
        if kept:
            logger.warning(
                "%s: the optimizer does not have %d parameters of which the checkpoint has a state, which is kept for "
                "the next save: %s",
                self.name,
                len(names),
                ", ".join(map(repr, names)),
            )


def _give_added(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give the optimizer what is kept of parameters that it has now: before its next step, or the next save."""
    kept = _kept.get(optimizer)
    if kept is None or not kept.parameters:
        return
    states = {name: each for group in kept.groups for name, each in group.states.items()}
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        name = kept.parameters.pop(parameter, None)
        if name in states and not optimizer.state.get(parameter):
            optimizer.state[parameter] = states[name]


def _are_flat(states: Mapping[str, Any]) -> bool:
    """Whether all are dicts of plain tensors by strings, as they most often are."""
    return (
        set(map(type, states.values())) <= {dict}
        and set(map(type, set().union(*states.values()))) <= {str}
        and set(map(type, chain.from_iterable(map(dict.values, states.values())))) <= _PLAIN
    )


def _is_flat(values: Any, parameter: torch.Tensor | None) -> bool:
    """Whether a state needs no structure: tensors by strings, which look as their parameter says."""
    if type(values) is not dict or not set(map(type, values)) <= {str}:
        return False
    if set(map(type, values.values())) <= _PLAIN:
        return True
    return all(
        isinstance(each, torch.Tensor) and placements_of(each, like=parameter) is None
        for each in values.values()
    )


def _found_in(tensors: Mapping[str, Any], start: str = "") -> Callable[..., Any]:
    return lambda path, *_: tensors[f"{start}{path}"]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(_like(0.0, one) == _like(0.0, other))


def _like(own: Any, stored: Any) -> Any:
    """A setting as a number if the program has a number. (Of a tensor, :class:`LiveOptimizer` takes the value.)"""
    if isinstance(stored, torch.Tensor) and not isinstance(own, torch.Tensor) and own is not None:
        return stored.item() if stored.numel() == 1 else stored
    return stored
