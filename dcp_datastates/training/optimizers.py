"""Optimizers, as objects that DCP saves and loads: state and settings by the names of parameters
(``format/optimizer_state.py``).

A load makes the tensors as they were stored, and reads them in place; nothing takes a step. A state of a parameter that
no rank's optimizer has is not read, so the load is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

import torch

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.optimizer_state import Group, OptimizerState, nested_states
from dcp_datastates.format.stored_names import is_under
from dcp_datastates.loading.fit import Fit
from dcp_datastates.loading.stored import Stored
from dcp_datastates.training.live_optimizer import LiveOptimizer, Places, placements_of

logger = logging.getLogger(__name__)

_SMALL: Final = ("groups.", "nested.", "rest.structure")

Read = Callable[[Stored, Collection[str]], dict[str, Any]]
"""Reads stored Python values, by their stored names."""


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
    """What a load fills: the nested values, as they are stored."""
    _loading: tuple[LiveOptimizer, OptimizerState] | None = None
    """The optimizer, and what is to be given to it. The load fills the tensors in that."""

    def live(self) -> LiveOptimizer:
        """The optimizer as it is now."""
        return LiveOptimizer(self.optimizer, self.models, self.rank, to_fill=self.fit is not None)

    # ---- saving --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state to save. For a load: what :meth:`lay_out` has made."""
        if self.fit is not None:
            return self._places
        live = self.live()
        parameters = live.names.parameters
        found = live.held.stored(lambda name, each: placements_of(each, like=parameters[name]))
        if live.names.unnamed:
            found["params"] = {name: parameters[name] for name in live.names.unnamed}
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
        self._places, self._loading = {}, None
        if not mine:
            first = next(iter(live.names.parameters), None)
            if first is not None and self.fit.takes(f"{start}groups.{first}"):
                self._places = {"groups": {first: None}}  # which is then missing
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
        for name, old in small.items():
            self._put(name, found[old])
        places = Places(live, names, stored, nested_states(self._places, self.renamed))
        wrappers = frozenset(stored.wrappers)
        for name, old in mine.items():
            if name in small or (is_under(old, wrappers) and old not in wrappers):
                continue  # it is there, or it is a part, which is read into its wrapper
            kind, _, rest = name.partition(".")
            if kind == "state":
                parameter, path = places.split(rest)
                if parameter is not None:  # else another rank's, or the reader says so
                    states = self._places.setdefault(kind, {}).setdefault(parameter, {})
                    states[path] = places.place(parameter, path, stored.get(old))
            elif kind != "params":
                self._put(name, stored.new(old))
            elif rest in live.names.parameters:
                self._put(name, live.names.parameters[rest])
        loaded = OptimizerState.of_stored(self._places, self.renamed, in_part=True)
        self._check(live, loaded, any(name.startswith("state.") for name in mine))
        self._loading = live, loaded

    def _put(self, name: str, place: Any) -> None:
        section, _, rest = name.partition(".")
        self._places.setdefault(section, {})[rest] = place

    def _check(self, live: LiveOptimizer, loaded: OptimizerState, moments: bool) -> None:
        """Raise :class:`IncompatibleStateError` if the stored state can be of no use to this optimizer. ``moments``:
        whether states of parameters are to be loaded.
        """
        ours = type(self.optimizer)
        whole = "param_groups" in loaded.rest
        if (loaded.groups or whole) and bool(live.held.groups) == whole:
            raise self._unfit(f"is of another kind than what {ours.__qualname__} gives")
        for group in loaded.groups if moments else ():
            known = {*self.optimizer.defaults, *live.held.groups[0].settings}
            keys = group.settings.keys()
            if group.kind != ours.__qualname__ and not (keys <= known or known <= keys):
                raise self._unfit(
                    f"is that of {group.kind}, and the program has {ours.__qualname__}"
                )
        names = [name for group in loaded.groups for name in group.names] if moments else []
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
        live, loaded = loading
        groups = [
            replace(group, settings=self._settings(group, loaded.groups))
            for group in live.held.groups
        ]
        states = {
            name: self._with_excluded(name, live.held.states.get(name), loaded.states.get(name))
            for name in live.names.parameters
        }
        states = {n: each for n, each in states.items() if isinstance(each, torch.Tensor) or each}
        live.give(OptimizerState(groups, states, loaded.rest))
        had = {name for group in loaded.groups for name in group.names}
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
        found = dict(own.settings)
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


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(_like(0.0, one) == _like(0.0, other))


def _like(own: Any, stored: Any) -> Any:
    """A setting as a number if the program has a number. (Of a tensor, :class:`LiveOptimizer` takes the value.)"""
    if isinstance(stored, torch.Tensor) and not isinstance(own, torch.Tensor) and own is not None:
        return stored.item() if stored.numel() == 1 else stored
    return stored
