"""What a training loop consists of, as a state that can be saved, and back.

A model and its optimizers become what torch's ``get_state_dict`` makes of them: named by parameters, the same for plain
models, DDP and FSDP2, and complete before the optimizer's first step. What differs between ranks gets a name for each
rank. Everything else is as DCP has it.

The parts are objects with ``state_dict()`` and ``load_state_dict()``, which DCP calls: so a part that fails to give its
state fails the save on all ranks.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.io.tensor_memory import is_wrapper
from dcp_datastates.manager.parts import (
    WHOLE,
    give_whole_state,
    is_by_parameter,
    members_of,
    optimizer_state,
    set_optimizer_state,
    state_to_fill,
    whole_state,
)
from dcp_datastates.manager.per_rank import (
    PerRank,
    RngState,
    differs,
    packed,
    packed_state,
    unpack,
    warn_of_order,
)
from dcp_datastates.manager.trainable import Trainable
from dcp_datastates.ranks.rank_set import RankSet

__all__ = ["TrainingState", "model_of"]

logger = logging.getLogger(__name__)

_RANK: Final = "rank-"
_PACKED: Final = "packed"
"""The name, below that of an object, of a state that DCP would change: it is stored as ``torch.save`` writes it."""


@dataclass
class _Model:
    model: torch.nn.Module

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


@dataclass
class _Trainable:
    name: str
    value: Trainable
    stored: Collection[str] = ()
    """The names in the checkpoint to load."""

    def state_dict(self) -> dict[str, Any]:
        start = f"{self.name}."
        own = {each[len(start) :] for each in self.stored if each.startswith(start)}
        return self.value.to_fill(own)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.load_state_dict(state)


@dataclass
class _Optimizer:
    name: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    stored: Collection[str] | None = None
    """The names in the checkpoint to load; None for a save."""
    members: list[list[str]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether it is stored as its ``state_dict()`` gives it."""
        if self.stored is None:
            return not is_by_parameter(self.optimizer)
        return any(each.startswith(f"{self.name}.{WHOLE}.") for each in self.stored)

    def state_dict(self) -> dict[str, Any]:
        if self.is_whole:
            return dict(_containers_copied(whole_state(self.optimizer)))
        if self.stored is None:
            return optimizer_state(self.model, self.optimizer)
        state = state_to_fill(self.model, self.optimizer, self.name, self.stored)
        self.members = members_of(state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.is_whole:
            give_whole_state(self.optimizer, state)
            return
        set_optimizer_state(self.model, self.optimizer, state, self.members)


@dataclass
class _Own:
    value: Stateful
    rank: int
    loaded: bytes | None = None

    def state_dict(self) -> dict[str, Any]:
        return {f"{_RANK}{self.rank}": packed(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state[f"{_RANK}{self.rank}"]


@dataclass
class _Object:
    """An object of the user's. It receives all that was saved of it."""

    value: Stateful

    def state_dict(self) -> dict[str, Any]:
        state = self.value.state_dict()
        if _PACKED in state or not _keeps_its_types(state):
            return {_PACKED: packed_state(state)}
        return dict(_containers_copied(state))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if _PACKED in state:
            unpack(self.value, state[_PACKED])
        else:
            self.value.load_state_dict(state)


class ToLoad(NamedTuple):
    """A state to load into."""

    state: dict[str, Any]
    filled: list[str]
    """The names of dicts and values, which become what is stored, too."""
    replaced: list[str]
    """The names of objects, which receive exactly what is stored."""
    left_out: list[str]
    """The names of what cannot be restored, which was said."""


class TrainingState:
    """The objects and values of a loop, by name, as the user passes them.

    Args:
        given: models, optimizers, objects with ``state_dict()`` and ``load_state_dict()``, tensors, values, and dicts
            and lists of them.

    Raises:
        ConfigurationError: an optimizer's parameters are in none of the models, or in several; a name is no string, or
            is that of two parts; a dict contains itself.
    """

    def __init__(self, given: Mapping[str, Any], rank_set: RankSet) -> None:
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f"the state is a {type(given).__name__}; pass a dict of names to models, optimizers and values"
            )
        self._rank_set = rank_set
        self._given = _parted(given)
        values = {name: inside[key] for name, (inside, key) in self._given.items()}
        self._models = [
            value.model if isinstance(value, Trainable) else value
            for value in values.values()
            if isinstance(value, (torch.nn.Module, Trainable))
        ]
        self._parts = {name: self._part(name, value) for name, value in values.items()}

    def to_save(self) -> dict[str, Any]:
        """The state, for ``async_save``."""
        return dict(self._parts)

    def warn(self) -> None:
        """Log what will not go on as it would have, after a restore."""
        for name, part in self._parts.items():
            if isinstance(part, _Own):
                warn_of_order(name, part.value)

    def to_load(self, stored: Collection[str]) -> ToLoad:
        """The state, for a load of the values that a checkpoint has under the names ``stored``.

        What the checkpoint has for another number of ranks fits no rank: it is left out, with a warning.
        """
        parts = dict(self._parts)
        filled, replaced, left_out = [], [], []
        for key, part in self._parts.items():
            if isinstance(part, _Optimizer):
                part.stored = stored
                if part.is_whole:
                    replaced.append(key)
            elif isinstance(part, _Trainable):
                part.stored = stored
            elif isinstance(part, _Own):
                found = sum(name.startswith(f"{key}.{_RANK}") for name in stored)
                if found not in (0, self._rank_set.world):
                    logger.warning(
                        "%r stays as it is: it was saved by %d ranks, and there are %d now",
                        key,
                        found,
                        self._rank_set.world,
                    )
                    del parts[key]
                    left_out.append(key)
            elif isinstance(part, _Object):
                replaced.append(key)
            elif not isinstance(part, (_Model, torch.Tensor)):
                filled.append(key)
        return ToLoad(parts, filled, replaced, left_out)

    def put_back(self, loaded: Mapping[str, Any]) -> None:
        """Finish a load: put values, which have no ``load_state_dict()``, into the user's dict, and then give the
        ranks their own states: the random generators last, since what comes before may draw from them.
        """
        own = [part for part in loaded.values() if isinstance(part, _Own)]
        for name, value in loaded.items():
            if value is self._parts[name]:
                continue
            inside, key = self._given[name]
            if not isinstance(inside, (dict, list)):
                raise ConfigurationError(
                    f"{name!r} lies in a {type(inside).__name__}; it must be a dict or a list to receive the value"
                )
            inside[key] = value
        for part in sorted(own, key=lambda each: isinstance(each.value, RngState)):
            if part.loaded is not None:
                unpack(part.value, part.loaded)

    def _part(self, name: str, value: Any) -> Any:
        if (mine := differs(value)) is not None:
            return _Own(mine, self._rank_set.rank)
        if isinstance(value, torch.nn.Module):
            return _Model(value)
        if isinstance(value, type) and isinstance(value, Stateful):
            raise ConfigurationError(
                f"the part {name!r} is the class {value.__name__}, not an object"
            )
        if isinstance(value, Trainable):
            return _Trainable(name, value)
        if isinstance(value, torch.optim.Optimizer):
            return _Optimizer(name, model_of(self._models, value, name), value)
        if _has_state(value):
            return _Object(value)
        return value


def model_of(
    models: Collection[torch.nn.Module], optimizer: torch.optim.Optimizer, name: str
) -> torch.nn.Module:
    """The smallest of ``models`` that has all parameters of ``optimizer``, which messages call ``name``.

    Raises :class:`ConfigurationError` if there is none.
    """
    wanted = {id(each) for group in optimizer.param_groups for each in group["params"]}
    parameters = {model: set(map(id, model.parameters())) for model in models}
    complete = [model for model, found in parameters.items() if wanted <= found]
    if complete:
        return min(complete, key=lambda model: len(parameters[model]))
    if any(wanted & found for found in parameters.values()):
        raise ConfigurationError(
            f"the parameters of the optimizer {name!r} are in several models, or some in none; pass these as one, "
            f"such as torch.nn.ModuleDict"
        )
    raise ConfigurationError(
        f"no model in the state has the parameters of the optimizer {name!r}; pass its model, too"
    )


def _keeps_its_types(value: Any) -> bool:
    """Whether a state comes back from DCP as it was: with strings as keys, plain dicts and lists, and none empty.

    One with sharded tensors cannot be packed, and passes.
    """
    return _is_plain(value) or _any_sharded(value)


def _is_plain(value: Any, top: bool = True) -> bool:
    if isinstance(value, Mapping):
        if type(value) not in (dict, OrderedDict) or (type(value) is OrderedDict and not top):
            return False
        keys = all(type(key) is str for key in value)
        return (
            (top or bool(value)) and keys and all(_is_plain(each, False) for each in value.values())
        )
    if isinstance(value, (list, tuple)) and any(
        isinstance(each, (Mapping, list, tuple, torch.Tensor)) for each in value
    ):
        return type(value) is list and all(_is_plain(each, False) for each in value)
    return True  # DCP stores it as one value, with its type


def _any_sharded(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_any_sharded, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_any_sharded, value))
    return isinstance(value, torch.Tensor) and (is_wrapper(value) or hasattr(value, "placements"))


def _containers_copied(value: Any) -> Any:
    """``value`` with dicts and lists of its own."""
    if isinstance(value, Mapping):
        return {key: _containers_copied(each) for key, each in value.items()}
    if type(value) is list:
        return [_containers_copied(each) for each in value]
    return value


def _parted(given: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """For each part by its name in DCP: what it lies in, and its key there.

    A dict, list or tuple is a part if it has tensors and values only. If an object with a state lies in it, at any
    depth, its values are parts: DCP would pickle such objects, and restore none.
    """
    found: dict[str, tuple[Any, Any]] = {}

    def look(inside: Any, path: str, around: tuple[int, ...]) -> None:
        for key, value in _items(inside):
            if not path and not isinstance(key, str):
                raise ConfigurationError(f"the state has the key {key!r}; names must be strings")
            name = f"{path}{key}"
            if _holds_objects(value, name, around):
                look(value, f"{name}.", (*around, id(value)))
            elif name in found:
                raise ConfigurationError(f"two parts of the state have the name {name!r}")
            else:
                found[name] = inside, key

    look(given, "", (id(given),))
    return found


def _holds_objects(value: Any, name: str, around: tuple[int, ...]) -> bool:
    """Whether an object with a state lies in ``value``, a container. ``around``: the ids of what that lies in."""
    if id(value) in around:
        raise ConfigurationError(f"the part {name!r} of the state contains itself")
    if _has_state(value):
        return False
    return any(
        _has_state(each) or _holds_objects(each, name, (*around, id(value)))
        for _, each in _items(value)
    )


def _has_state(value: Any) -> bool:
    return not isinstance(value, (torch.Tensor, type)) and isinstance(value, (Stateful, PerRank))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return enumerate(value) if isinstance(value, (list, tuple)) else ()
