"""An optimizer as it is now: the names of its parameters, and its state and settings by these names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from dcp_datastates.manager.naming import has_fsdp1, parameters_of

__all__ = ["LiveOptimizer"]

_NO_SETTINGS: Final = frozenset({"params", "param_names"})


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
        mine = _parameters(optimizer)
        owners = parameters_of(models, mine)
        sharded = [each for name in owners for each in models[name] if has_fsdp1(each)]
        self._fsdp1 = sharded[0] if sharded else None
        self.parameters: dict[str, torch.Tensor | None] = {}
        """The optimizer's, in their order. None: only torch knows it, by its name (FSDP1)."""
        self.elsewhere: dict[str, torch.Tensor] = {}
        """The parameters of its models that the optimizer does not have."""
        self.in_model: dict[str, str] = {}
        """The names within the state of those that are in a model."""
        self.unnamed: list[str] = []
        """The names of those that are in no model."""
        if self._fsdp1 is not None:
            with _gradients_for(optimizer, first_state=to_fill):
                packed: dict[str, Any] = dict(get_optimizer_state_dict(self._fsdp1, optimizer))
            names = list(chain.from_iterable(group["params"] for group in packed["param_groups"]))
            self.parameters = dict.fromkeys(names)
            self.in_model = {name: f"{next(iter(owners))}.{name}" for name in names}
        else:
            packed = optimizer.state_dict()
            names = self._name(mine, owners, rank)
        self.states: dict[str, Any] = {}
        """The states of parameters that have some."""
        self.groups: list[tuple[list[str], dict[str, Any]]] = []
        """The names and the settings of each group."""
        self.rest: dict[str, Any] = {}
        """What ``state_dict()`` gives beside these; all, if it does not number the parameters as torch's does."""
        self._unpack(packed, names)

    def _name(
        self,
        mine: Sequence[torch.Tensor],
        owners: Mapping[str, Mapping[str, torch.Tensor]],
        rank: int | None,
    ) -> list[str]:
        several = len(owners) > 1
        names: dict[int, str] = {}
        found: dict[str, torch.Tensor] = {}
        for model, parameters in owners.items():
            for key, parameter in parameters.items():
                name = f"{model}.{key}" if several else key
                names.setdefault(id(parameter), name)
                found[name] = parameter
                self.in_model[name] = f"{model}.{key}"
        for number, parameter in enumerate(mine):
            name = names.get(id(parameter), "")
            if not name:
                own = rank is not None and not isinstance(parameter, DTensor)
                name = f"rank-{rank}.position-{number}" if own else f"position-{number}"
                self.unnamed.append(name)
            self.parameters[name] = parameter
        self.elsewhere = {n: each for n, each in found.items() if n not in self.parameters}
        return list(self.parameters)

    def _unpack(self, packed: dict[str, Any], names: list[str]) -> None:
        self.rest = dict(packed)
        groups, states = packed.get("param_groups"), packed.get("state")
        if not isinstance(groups, list) or not isinstance(states, Mapping):
            return
        numbers = list(chain.from_iterable(group["params"] for group in groups))
        by_number = dict(zip(numbers, names, strict=False))
        if numbers not in (list(range(len(names))), names):
            return
        for group in groups:
            settings = {key: each for key, each in group.items() if key not in _NO_SETTINGS}
            self.groups.append(([by_number[number] for number in group["params"]], settings))
        of_none = {}
        for key, values in states.items():
            if key not in by_number:
                of_none[key] = values
            elif values is not None and (not isinstance(values, Mapping) or values):
                self.states[by_number[key]] = values
        del self.rest["param_groups"], self.rest["state"]
        if of_none:
            self.rest["state"] = of_none

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
