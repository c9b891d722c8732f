"""An optimizer as it is now: the names of its parameters, and its state and settings by these names; and places for
what is stored of it: its own tensors where they fit, and new ones as they were stored.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
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
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_sharded

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.stored_names import prefixes_of
from dcp_datastates.loading.stored import Described, Stored
from dcp_datastates.manager.models import (
    Wrappers,
    device_of,
    empty_like,
    fingerprint,
    parameters_of,
)
from dcp_datastates.manager.structure import Structure, put_together, taken_apart

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
            if Wrappers.of(module).has_fsdp1:
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


def placements_of(
    tensor: torch.Tensor, *, like: torch.Tensor | None
) -> tuple[int | None, ...] | None:
    """The placements of a DTensor of another shape than its parameter: the dimension of each shard, and None for a
    replica. None for any other tensor.
    """
    if not isinstance(tensor, DTensor) or like is None or tensor.shape == like.shape:
        return None
    return tuple(each.dim if isinstance(each, Shard) else None for each in tensor.placements)


class Places:
    """Makes the places.

    Args:
        live: The optimizer as it is.
        names: The stored names to load, by the program's.
        stored: What is stored, by its names.
        nested: The structures of states that are not flat.
    """

    def __init__(
        self,
        live: LiveOptimizer,
        names: Mapping[str, str],
        stored: Stored,
        nested: Mapping[str, Structure],
    ) -> None:
        self._live = live
        self._stored_as = {
            name: stored.get(names.get(full, full)) for name, full in live.in_model.items()
        }
        self._parameters = {**live.elsewhere, **live.parameters}
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._placements: dict[str, dict[str, tuple[int | None, ...] | None]] = defaultdict(dict)
        for name, structure in nested.items():
            noted = self._placements[name]
            put_together(structure, lambda path, note=None, to=noted: to.update({path: note}))

    def split(self, name: str) -> tuple[str | None, str]:
        """The parameter to which the part of its state with this name belongs, and the rest of the name."""
        for prefix in sorted(prefixes_of(name), key=len, reverse=True):
            if prefix in self._parameters and prefix != name:
                return prefix, name[len(prefix) + 1 :]
        return None, name

    def of_state(self, parameter: str, path: str, entry: Described | None) -> Any:
        """The place of a tensor of a parameter's state."""
        held = self._held(parameter).get(path)
        like = self._parameters[parameter]
        if entry is None:  # a wrapper, stored as its parts
            return self._wrapper(parameter, path, like) if held is None else held
        if held is not None and held.shape == entry.size:
            return held
        if like is None:
            return self.plain(entry)
        dtype = entry.dtype
        saved = self._stored_as.get(parameter)
        if saved is not None and saved.size == entry.size:
            # It is as the parameter, which may have changed: then the load says so.
            dtype = like.dtype if dtype == saved.dtype else dtype
            return empty_like(like, dtype)
        if like.shape == entry.size:
            return empty_like(like, dtype)
        note = self._placements[parameter].get(path) if parameter in self._placements else None
        if note is not None and isinstance(like, DTensor) and len(note) == like.device_mesh.ndim:
            placements = [Replicate() if each is None else Shard(each) for each in note]
            return empty_sharded(
                *entry.size, dtype=dtype, device_mesh=like.device_mesh, placements=placements
            )
        return torch.empty(entry.size, dtype=dtype, device=self._device(path, like))

    @staticmethod
    def plain(entry: Described | None) -> torch.Tensor | None:
        """The place of any other tensor; None for a value."""
        if entry is None:
            return None
        return torch.empty(entry.size, dtype=entry.dtype, device="cpu")

    def _held(self, parameter: str) -> dict[str, torch.Tensor]:
        if parameter not in self._tensors:
            state = self._live.states.get(parameter)
            self._tensors[parameter] = taken_apart(state)[0] if isinstance(state, Mapping) else {}
        return self._tensors[parameter]

    def _device(self, path: str, like: torch.Tensor) -> torch.device:
        """As torch's ``load_state_dict()`` has it: a step is read by the host, unless the optimizer says otherwise."""
        on_device = any(
            settings.get(each)
            for _, settings in self._live.groups
            for each in ("capturable", "fused")
        )
        return device_of(like) if path != "step" or on_device else torch.device("cpu")

    def _wrapper(self, parameter: str, path: str, like: torch.Tensor | None) -> torch.Tensor:
        """A new wrapper subclass, such as torchao's: only the optimizer can make one. A copy of it, which has nothing
        else, takes a step with a parameter of zeros.
        """
        made = None
        if like is not None:
            stand_in = torch.nn.Parameter(torch.zeros_like(like))
            stand_in.grad = torch.zeros_like(stand_in)
            clone: Any = object.__new__(type(self._live.optimizer))
            vars(clone).update(
                vars(self._live.optimizer)
            )  # copy.copy() loses attributes of subclasses
            clone.state = defaultdict(dict)
            settings = self._live.groups[0][1]
            clone.param_groups = [{**settings, "params": [stand_in]}]
            step = type(clone).step
            getattr(step, "__wrapped__", step)(clone)  # without the hooks
            made = taken_apart(dict(clone.state.get(stand_in, {})))[0].get(path)
        if made is None:
            raise IncompatibleStateError(
                f"{path!r} of the parameter {parameter!r} was saved as a tensor subclass, which "
                f"{type(self._live.optimizer).__qualname__} does not make; load it as plain tensors with load()"
            )
        return made
