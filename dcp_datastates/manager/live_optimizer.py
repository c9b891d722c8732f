"""An optimizer as it is now: the names of its parameters, and its state and settings by these names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from dcp_datastates.manager.models import fingerprint, has_fsdp1, parameters_of

_NO_SETTINGS: Final = frozenset({"params", "param_names"})


@dataclass
class _Naming:
    """The names of an optimizer's parameters."""

    of: Any
    """What they hold for: the parameters of the models, and the optimizer's."""
    fsdp1: torch.nn.Module | None = None
    parameters: dict[str, torch.Tensor | None] = field(default_factory=dict)
    elsewhere: dict[str, torch.Tensor] = field(default_factory=dict)
    in_model: dict[str, str] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)


_known: MutableMapping[torch.optim.Optimizer, _Naming] = WeakKeyDictionary()
"""What was found for an optimizer, which counts until the model's or its own parameters change."""


class LiveOptimizer:
    """What ``state_dict()`` of an optimizer gives, by names of parameters.

    A parameter that is in none of the models has its position for a name; if it is no shard, also the rank's number,
    since ranks may have different ones. The names in several models begin with those of the models.

    Args:
        optimizer: The optimizer.
        models: The models of the state, each as its parts.
        rank: This rank, if there are several.
        to_fill: Whether a state is loaded: torch, which alone knows the states of FSDP1, then makes one for each
            parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: Mapping[str, Sequence[torch.nn.Module]],
        rank: int | None,
        *,
        to_fill: bool = False,
    ) -> None:
        self.optimizer = optimizer
        naming = _naming(optimizer, models, rank)
        self._fsdp1 = naming.fsdp1
        self.parameters = naming.parameters
        """The optimizer's, in their order. None: only torch knows it, by its name (FSDP1)."""
        self.elsewhere = naming.elsewhere
        """The parameters of its models that the optimizer does not have."""
        self.in_model = naming.in_model
        """The names within the state of those that are in a model."""
        self.unnamed = naming.unnamed
        """The names of those that are in no model."""
        if self._fsdp1 is None:
            packed = optimizer.state_dict()
        else:
            with _gradients_for(optimizer, first_state=to_fill):
                packed = dict(get_optimizer_state_dict(self._fsdp1, optimizer))
            names = list(chain.from_iterable(group["params"] for group in packed["param_groups"]))
            self.parameters = dict.fromkeys(names)
            (model,) = naming.in_model
            self.in_model = {name: f"{model}.{name}" for name in names}
        self.states: dict[str, Any] = {}
        """The states of parameters that have some."""
        self.groups: list[tuple[list[str], dict[str, Any]]] = []
        """The names and the settings of each group."""
        self.rest: dict[str, Any] = dict(packed)
        """What ``state_dict()`` gives beside these; all, if it does not number the parameters as torch's does."""
        self._unpack(packed, list(self.parameters))

    def _unpack(self, packed: dict[str, Any], names: list[str]) -> None:
        groups, states = packed.get("param_groups"), packed.get("state")
        if not isinstance(groups, list) or not isinstance(states, Mapping):
            return
        numbers = list(chain.from_iterable(group["params"] for group in groups))
        if numbers not in (list(range(len(names))), names):
            return
        by_number = dict(zip(numbers, names, strict=True))
        for group in groups:
            settings = {key: each for key, each in group.items() if key not in _NO_SETTINGS}
            self.groups.append(([by_number[number] for number in group["params"]], settings))
        others = states.keys() - by_number.keys()
        self.states = {
            by_number[key]: each
            for key, each in states.items()
            if key not in others and (type(each) is not dict or each)
        }
        del self.rest["param_groups"], self.rest["state"]
        if others:
            self.rest["state"] = {key: each for key, each in states.items() if key in others}

    def give(
        self, states: Mapping[str, Any], settings: Sequence[Mapping[str, Any]], rest: dict[str, Any]
    ) -> None:
        """Give the optimizer states by names, the settings of its groups, and the rest, as ``load_state_dict()`` does.

        Values stay as they are: torch's ``load_state_dict()`` casts tensors to the dtype of their parameter, and
        changes strings. (It makes tensors of numbers for some optimizers.)
        """
        if not self.groups:
            self.optimizer.load_state_dict(rest)
            return
        if self._fsdp1 is not None:
            groups = [
                {**given, "params": names}
                for (names, _), given in zip(self.groups, settings, strict=True)
            ]
            state: dict[str, Any] = {"state": dict(states), "param_groups": groups}
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(self._fsdp1, self.optimizer, state, options=options)
            return
        packed = self.optimizer.state_dict()["param_groups"]
        numbers = {name: number for number, name in enumerate(self.parameters)}
        by_number = {numbers[name]: values for name, values in states.items()}
        groups = [{**given, **new} for given, new in zip(packed, settings, strict=True)]
        others = {**rest, "state": {**rest.get("state", {}), **by_number}, "param_groups": groups}
        tensors = [
            {key: each for key, each in group.items() if isinstance(each, torch.Tensor)}
            for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(others)
        if type(self.optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            return
        for name, values in states.items():
            if not isinstance(values, Mapping):
                continue
            held = self.optimizer.state[self.parameters[name]]  # type: ignore[index]
            for key, value in values.items():
                if not (
                    isinstance(value, (int, float)) and isinstance(held.get(key), torch.Tensor)
                ):
                    held[key] = value
        for group, held in zip(self.optimizer.param_groups, tensors, strict=True):
            for key, tensor in held.items():  # a captured graph reads them
                value = group[key]
                tensor.copy_(value) if isinstance(value, torch.Tensor) else tensor.fill_(value)
                group[key] = tensor


def _naming(
    optimizer: torch.optim.Optimizer,
    models: Mapping[str, Sequence[torch.nn.Module]],
    rank: int | None,
) -> _Naming:
    mine = _parameters(optimizer)
    of = rank, list(map(id, mine)), *fingerprint(models)
    found = _known.get(optimizer)
    if found is not None and found.of == of:
        return found
    owners = parameters_of(models, mine)
    # The modules may have been resharded, and have other parameters now.
    found = _Naming((rank, list(map(id, mine)), *fingerprint(models)))
    for name in owners:
        for module in models[name]:
            if has_fsdp1(module):
                found.fsdp1, found.in_model = module, {name: name}
                return found
    names: dict[int, str] = {}
    every: dict[str, torch.Tensor] = {}
    for model, parameters in owners.items():
        for key, parameter in parameters.items():
            name = f"{model}.{key}" if len(owners) > 1 else key
            names.setdefault(id(parameter), name)
            every[name] = parameter
            found.in_model[name] = f"{model}.{key}"
    for number, parameter in enumerate(mine):
        name = names.get(id(parameter), "")
        if not name:
            own = rank is not None and not isinstance(parameter, DTensor)
            name = f"rank-{rank}.position-{number}" if own else f"position-{number}"
            found.unnamed.append(name)
        found.parameters[name] = parameter
    found.elsewhere = {n: each for n, each in every.items() if n not in found.parameters}
    _known[optimizer] = found
    return found


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


@contextlib.contextmanager
def _gradients_for(optimizer: torch.optim.Optimizer, *, first_state: bool) -> Iterator[None]:
    """Let torch make an optimizer's first state, or keep it from that: it does not where a parameter has a gradient."""
    parameters = _parameters(optimizer)
    wanted: dict[torch.Tensor, torch.Tensor | None] = {}
    if first_state:
        wanted = dict.fromkeys(parameters)
    elif parameters and not optimizer.state and all(each.grad is None for each in parameters):
        smallest = min(parameters, key=torch.Tensor.numel)
        wanted[smallest] = torch.zeros_like(smallest)
    before = {parameter: parameter.grad for parameter in wanted}
    try:
        for parameter, gradient in wanted.items():
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient
