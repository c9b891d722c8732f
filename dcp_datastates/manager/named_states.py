"""States by names of parameters, as torch's ``get_state_dict`` gives them, at the cost of ``state_dict()`` from the
second call on.

torch looks for each name anew in each call, which takes three times as long as all else. What it has found counts as
long as ``state_dict()`` has the same keys, and the model the same parameters under the same names. FSDP1 changes what
``state_dict()`` does: such models always go to torch.
"""

from __future__ import annotations

import operator
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = ["model_state", "optimizer_state"]

_PREFIXES: Final = ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")
"""What DDP and ``torch.compile`` put before the names of all that they wrap."""


@dataclass(frozen=True)
class _ModelNames:
    keys: list[str]
    """Those of ``state_dict()``."""
    names: list[str]


@dataclass(frozen=True)
class _OptimizerNames:
    of_model: list[tuple[str, torch.nn.Parameter]]
    parameters: list[torch.Tensor]
    """Those of the optimizer."""
    names: list[str]


_models: MutableMapping[torch.nn.Module, _ModelNames] = WeakKeyDictionary()
_optimizers: MutableMapping[torch.optim.Optimizer, _OptimizerNames] = WeakKeyDictionary()


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """The result of ``get_model_state_dict(model)``."""
    if _has_fsdp1(model):
        return get_model_state_dict(model)
    known = _models.get(model)
    if known is not None:
        state = model.state_dict()
        if list(state) == known.keys:
            return dict(zip(known.names, state.values(), strict=True))
    named = get_model_state_dict(model)
    keys, names = list(model.state_dict()), list(named)
    if any(keys == [f"{prefix}{name}" for name in names] for prefix in _PREFIXES):
        _models[model] = _ModelNames(keys, names)
    else:
        _models.pop(model, None)
    return named


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The result of ``get_optimizer_state_dict(model, optimizer)``."""
    if _has_fsdp1(model) or not optimizer.state:
        return dict(get_optimizer_state_dict(model, optimizer))
    of_model = list(model.named_parameters())
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    known = _optimizers.get(optimizer)
    if (
        known is not None
        and _are_same(known.parameters, parameters)
        and _are_same([each for _, each in known.of_model], [each for _, each in of_model])
        and [name for name, _ in known.of_model] == [name for name, _ in of_model]
    ):
        state = optimizer.state_dict()
        groups = state["param_groups"]
        if list(chain.from_iterable(g["params"] for g in groups)) == list(range(len(parameters))):
            names = known.names
            return {
                "state": {names[number]: each for number, each in state["state"].items()},
                "param_groups": [
                    {**group, "params": [names[number] for number in group["params"]]}
                    for group in groups
                ],
            }
    named: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    names = list(chain.from_iterable(group["params"] for group in named["param_groups"]))
    _optimizers[optimizer] = _OptimizerNames(of_model, parameters, names)
    return named


def _are_same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _has_fsdp1(model: torch.nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
