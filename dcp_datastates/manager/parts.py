"""An optimizer's state by the names of its model's parameters, as it is; and back.

torch's ``get_optimizer_state_dict`` has two habits that a checkpoint must not have: it makes an optimizer that has no
state yet take a step (which leaves a state behind, and calls hooks), and it wants a state of every parameter back,
although a parameter that never had a gradient has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

__all__ = [
    "WHOLE",
    "give_whole_state",
    "is_by_parameter",
    "members_of",
    "optimizer_state",
    "set_optimizer_state",
    "state_to_fill",
    "whole_state",
]


WHOLE: Final = "state_dict"
"""The name, below that of an optimizer, under which lies what its ``state_dict()`` gave."""


def is_by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state belongs to parameters, as torch's functions take for granted: tensors and numbers for each.

    That of LBFGS belongs to all of them, and has lists: it comes back only by ``load_state_dict()``.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return False
    values = chain.from_iterable(state.values() for state in optimizer.state.values())
    return not any(isinstance(value, (list, tuple, dict)) for value in values)


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's ``state_dict()``, with strings as keys."""
    state = optimizer.state_dict()
    return {WHOLE: {**state, "state": {str(n): each for n, each in state["state"].items()}}}


def give_whole_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give the optimizer what :func:`whole_state` gave."""
    whole = state[WHOLE]
    by_number = {int(n): each for n, each in whole.get("state", {}).items()}
    optimizer.load_state_dict({**whole, "state": by_number})


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state to save: what the optimizer has, and nothing more."""
    with _left_as_it_is(optimizer):
        return dict(get_optimizer_state_dict(model, optimizer))


def state_to_fill(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    name: str,
    stored: Collection[str],
) -> dict[str, Any]:
    """A state to load into: of those parameters of which the checkpoint has a state.

    Args:
        name: the optimizer's name in the checkpoint.
        stored: the names of all values in the checkpoint.
    """
    with _without_gradients(optimizer):
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    found = {
        parameter: values
        for parameter, values in state["state"].items()
        if any(f"{name}.state.{parameter}.{key}" in stored for key in values)
    }
    return {**state, "state": found}


def members_of(state: dict[str, Any]) -> list[list[str]]:
    """The names of the parameters of each group, in a state to fill."""
    return [list(group["params"]) for group in state["param_groups"]]


def set_optimizer_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    members: list[list[str]],
) -> None:
    """Give the optimizer a loaded state. Parameters of which it has none have none afterwards.

    Its groups keep their parameters, ``members``, whichever groups these were in when the state was saved.
    """
    for group, names in zip(state["param_groups"], members, strict=True):
        group["params"] = names
    set_optimizer_state_dict(
        model, optimizer, optim_state_dict=state, options=StateDictOptions(strict=False)
    )


@contextlib.contextmanager
def _left_as_it_is(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from making an optimizer's first state: it does not where a parameter has a gradient."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if optimizer.state or not parameters or any(each.grad is not None for each in parameters):
        yield
        return
    smallest = min(parameters, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


@contextlib.contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch make an optimizer's first state: it does not where a parameter has a gradient."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [each.grad for each in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
