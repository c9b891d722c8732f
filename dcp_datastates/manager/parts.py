"""Models and optimizers, as objects that DCP saves and loads.

They become what torch's ``get_state_dict`` makes of them: named by parameters, the same for plain models, DDP and
FSDP2, and complete before the optimizer's first step.

torch's ``get_optimizer_state_dict`` has two habits that a checkpoint must not have: it makes an optimizer that has no
state yet take a step (which leaves a state behind, and calls hooks), and it wants a state of every parameter back,
although a parameter that never had a gradient has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dcp_datastates.manager.named_states import model_state, optimizer_state
from dcp_datastates.manager.trainable import Trainable

__all__ = ["ModelPart", "OptimizerPart", "containers_copied", "names_below", "owners_of"]

_WHOLE: Final = "state_dict"
"""The name, below that of an optimizer, under which lies what its ``state_dict()`` gave."""


@dataclass
class ModelPart:
    """A model, or what is trained of one."""

    given: torch.nn.Module | Trainable
    strict: bool = True
    """Whether the model must take exactly the values of a loaded state."""
    stored: Collection[str] = ()
    """The names below this part in the checkpoint to load."""

    @property
    def model(self) -> torch.nn.Module:
        """The whole model."""
        return self.given.model if isinstance(self.given, Trainable) else self.given

    def state_dict(self) -> dict[str, Any]:
        """The model's tensors by name: not copies, but of FSDP1."""
        if isinstance(self.given, Trainable):
            return self.given.to_fill(self.stored)
        return model_state(self.given)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the model the values of a state."""
        if isinstance(self.given, Trainable):
            self.given.load_state_dict(state)
        else:
            set_model_state_dict(self.given, state, options=StateDictOptions(strict=self.strict))


@dataclass
class OptimizerPart:
    """An optimizer of ``model``. Its state is what the optimizer has, and nothing more. Parameters of which a loaded
    state has none have none afterwards.

    A state that torch's functions cannot name by parameters is stored whole, as ``state_dict()`` gives it: if ``model``
    is None; and that of LBFGS, which belongs to all parameters, and has lists.
    """

    optimizer: torch.optim.Optimizer
    model: torch.nn.Module | None
    stored: Collection[str] | None = None
    """The names below this part in the checkpoint to load; None for a save."""
    _groups: list[list[str]] = field(default_factory=list)
    """The parameters of each group: it keeps them, whichever groups these were in when the state was saved."""

    @property
    def is_whole(self) -> bool:
        """Whether it is stored as its ``state_dict()`` gives it."""
        if self.stored is not None:
            return any(each.startswith(f"{_WHOLE}.") for each in self.stored)
        if self.model is None or isinstance(self.optimizer, torch.optim.LBFGS):
            return True
        values = chain.from_iterable(state.values() for state in self.optimizer.state.values())
        return any(isinstance(value, (list, tuple, dict)) for value in values)

    def state_dict(self) -> dict[str, Any]:
        """The state to save, or to load into: then of those parameters of which the checkpoint has a state."""
        if self.is_whole:
            whole = containers_copied(self.optimizer.state_dict())
            return {
                _WHOLE: {**whole, "state": {str(n): each for n, each in whole["state"].items()}}
            }
        assert self.model is not None
        with _gradients_for(self.optimizer, first_state=self.stored is not None):
            state = optimizer_state(self.model, self.optimizer)
        if self.stored is None:
            return state
        self._groups = [list(group["params"]) for group in state["param_groups"]]
        found = {
            parameter: values
            for parameter, values in state["state"].items()
            if any(f"state.{parameter}.{key}" in self.stored for key in values)
        }
        return {**state, "state": found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the optimizer a loaded state."""
        if self.is_whole:
            whole = state[_WHOLE]
            by_number = {int(n): each for n, each in whole.get("state", {}).items()}
            self.optimizer.load_state_dict({**whole, "state": by_number})
            return
        assert self.model is not None
        for group, names in zip(state["param_groups"], self._groups, strict=True):
            group["params"] = names
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(self.model, self.optimizer, state, options=options)


@contextlib.contextmanager
def _gradients_for(optimizer: torch.optim.Optimizer, *, first_state: bool) -> Iterator[None]:
    """Let torch make an optimizer's first state, or keep it from that: it does not where a parameter has a gradient."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
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


def owners_of(
    models: Mapping[str, torch.nn.Module], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.nn.Module], bool]:
    """Those of ``models`` that have parameters of ``optimizer``, and whether these are all. One that has all of them
    comes alone: the smallest.
    """
    wanted = {id(each) for group in optimizer.param_groups for each in group["params"]}
    parameters = {name: set(map(id, model.parameters())) for name, model in models.items()}
    if complete := [name for name, found in parameters.items() if wanted <= found]:
        smallest = min(complete, key=lambda name: len(parameters[name]))
        return {smallest: models[smallest]}, True
    found = {name: models[name] for name, each in parameters.items() if wanted & each}
    return found, wanted <= set().union(*parameters.values())


def names_below(names: Collection[str], prefix: str) -> set[str]:
    """The rest of those ``names`` that lie below ``prefix``."""
    start = f"{prefix}."
    return {name.removeprefix(start) for name in names if name.startswith(start)}


def containers_copied(value: Any) -> Any:
    """``value`` with dicts and lists of its own."""
    if isinstance(value, Mapping):
        return {key: containers_copied(each) for key, each in value.items()}
    if type(value) is list:
        return [containers_copied(each) for each in value]
    return value
