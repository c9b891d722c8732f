"""An optimizer as it is now: the names of its parameters, and its state and settings by these names; and places for
what is stored of it: its own tensors where they fit, and new ones as they were stored.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any
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
from dcp_datastates.format.optimizer_state import OptimizerState
from dcp_datastates.format.stored_names import prefixes_of
from dcp_datastates.format.structure import Structure, put_together, taken_apart
from dcp_datastates.loading.stored import Described, Stored
from dcp_datastates.training.models import Wrappers, fingerprint, parameters_of


@dataclass
class Names:
    """The names of an optimizer's parameters.

    A parameter that is in none of the models has its position for a name; if it is no shard, also the rank's number,
    since ranks may have different ones. The names in several models begin with those of the models.
    """

    of: Any
    """What they hold for: the parameters of the models, and the optimizer's."""
    fsdp1: torch.nn.Module | None = None
    """Of such a model, torch alone knows the parameters, by their names."""
    parameters: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """The optimizer's, in their order; None with FSDP1."""
    in_model: dict[str, str] = field(default_factory=dict)
    """The names within the state of those that are in a model."""
    unnamed: list[str] = field(default_factory=list)
    """The names of those that are in no model."""


_known: MutableMapping[torch.optim.Optimizer, Names] = WeakKeyDictionary()
"""What was found for an optimizer, which counts until the model's or its own parameters change."""


class LiveOptimizer:
    """What ``state_dict()`` of an optimizer gives, by names of parameters.

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
        self.names = names_of(optimizer, models, rank)
        if self.names.fsdp1 is None:
            packed = optimizer.state_dict()
        else:
            had_state = bool(optimizer.state)
            with _gradients_for(optimizer, first_state=to_fill):
                packed = dict(get_optimizer_state_dict(self.names.fsdp1, optimizer))
            if not had_state:
                optimizer.state.clear()  # torch took a step to make one
            found = list(chain.from_iterable(group["params"] for group in packed["param_groups"]))
            (model,) = self.names.in_model
            in_model = {name: f"{model}.{name}" for name in found}
            self.names = replace(self.names, parameters=dict.fromkeys(found), in_model=in_model)
        kind = type(optimizer).__qualname__
        self.held = OptimizerState.of_packed(packed, list(self.names.parameters), kind)
        """Its state and settings."""

    def give(self, given: OptimizerState) -> None:
        """Give the optimizer a state, as ``load_state_dict()`` does. Its groups are those that the optimizer has.

        Values stay as they are: torch's ``load_state_dict()`` casts tensors to the dtype of their parameter, and
        changes strings. (It makes tensors of numbers for some optimizers.)
        """
        packed = given.packed(by_name=self.names.fsdp1 is not None)
        if self.names.fsdp1 is not None:
            options = StateDictOptions(strict=False)
            set_optimizer_state_dict(self.names.fsdp1, self.optimizer, packed, options=options)
            return
        own = self.optimizer.param_groups
        for group, mine in zip(packed["param_groups"], own, strict=True) if given.groups else ():
            if "param_names" in mine:  # hooks may read them
                group["param_names"] = mine["param_names"]
        tensors = [
            {key: each for key, each in group.items() if isinstance(each, torch.Tensor)}
            for group in own
        ]
        self.optimizer.load_state_dict(packed)
        is_torchs = type(self.optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        if not (given.groups and is_torchs):
            return
        for name, values in given.states.items():
            if not isinstance(values, Mapping):
                continue
            held = self.optimizer.state[self.names.parameters[name]]  # type: ignore[index]
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


def names_of(
    optimizer: torch.optim.Optimizer,
    models: Mapping[str, Sequence[torch.nn.Module]],
    rank: int | None,
) -> Names:
    """The names of the optimizer's parameters in these ``models``."""
    mine = parameters_in(optimizer)
    of = rank, list(map(id, mine)), *fingerprint(models)
    found = _known.get(optimizer)
    if found is not None and found.of == of:
        return found
    owners = parameters_of(models, mine)
    # The modules may have been resharded, and have other parameters now.
    found = Names((rank, list(map(id, mine)), *fingerprint(models)))
    for name in owners:
        for module in models[name]:
            if Wrappers.of(module).has_fsdp1:
                found.fsdp1, found.in_model = module, {name: name}
                return found
    names: dict[int, str] = {}
    for model, parameters in owners.items():
        for key, parameter in parameters.items():
            name = f"{model}.{key}" if len(owners) > 1 else key
            names.setdefault(id(parameter), name)
            found.in_model[name] = f"{model}.{key}"
    for number, parameter in enumerate(mine):
        name = names.get(id(parameter), "")
        if not name:
            own = rank is not None and not isinstance(parameter, DTensor)
            name = f"rank-{rank}.position-{number}" if own else f"position-{number}"
            found.unnamed.append(name)
        found.parameters[name] = parameter
    _known[optimizer] = found
    return found


def parameters_in(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters, in their order."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


@contextlib.contextmanager
def _gradients_for(optimizer: torch.optim.Optimizer, *, first_state: bool) -> Iterator[None]:
    """Let torch make an optimizer's first state, or keep it from that: it does not where a parameter has a gradient."""
    parameters = parameters_in(optimizer)
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


# ---- places for what is stored -------------------------------------------------------------------


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
    """Makes places for the tensors of parameters' states.

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
        in_model = live.names.in_model.items()
        self._stored_as = {name: stored.get(names.get(full, full)) for name, full in in_model}
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._placements: dict[tuple[str, str], tuple[int | None, ...]] = {}
        for name, structure in nested.items():

            def note(path: str, noted: Any = None, of: str = name) -> None:
                self._placements[of, path] = noted

            put_together(structure, note)

    def split(self, name: str) -> tuple[str | None, str]:
        """The parameter to which the part of its state with this name belongs, and the rest of the name."""
        for prefix in sorted(prefixes_of(name), key=len, reverse=True):
            if prefix in self._live.names.parameters and prefix != name:
                return prefix, name[len(prefix) + 1 :]
        return None, name

    def place(self, parameter: str, path: str, entry: Described | None) -> Any:
        """The place of a tensor of a parameter's state. ``entry`` is None for a wrapper, which is stored as its parts.

        A tensor that has the shape of its parameter is placed as the parameter is. If the parameter has changed since
        the save, the load says so.
        """
        held = self._held(parameter).get(path)
        if held is not None and (entry is None or held.shape == entry.size):
            return held
        like = self._live.names.parameters[parameter]
        if entry is None:
            return self._wrapper(parameter, path, like)
        if like is None:
            return torch.empty(entry.size, dtype=entry.dtype, device="cpu")
        saved = self._stored_as.get(parameter) or Described(like.shape, like.dtype)
        if saved.size == entry.size:
            dtype = like.dtype if entry.dtype == saved.dtype else entry.dtype
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        note = self._placements.get((parameter, path))
        if note is not None and isinstance(like, DTensor) and len(note) == like.device_mesh.ndim:
            placements = [Replicate() if each is None else Shard(each) for each in note]
            return empty_sharded(
                *entry.size, dtype=entry.dtype, device_mesh=like.device_mesh, placements=placements
            )
        return torch.empty(entry.size, dtype=entry.dtype, device=self._device(path, like))

    def _held(self, parameter: str) -> dict[str, torch.Tensor]:
        if parameter not in self._tensors:
            state = self._live.held.states.get(parameter)
            self._tensors[parameter] = taken_apart(state)[0] if isinstance(state, Mapping) else {}
        return self._tensors[parameter]

    def _device(self, path: str, like: torch.Tensor) -> torch.device:
        """As torch's ``load_state_dict()`` has it: a step is read by the host, unless the optimizer says otherwise."""
        flags = ("capturable", "fused")
        on_device = any(
            each.settings.get(flag) for each in self._live.held.groups for flag in flags
        )
        return like.device if path != "step" or on_device else torch.device("cpu")

    def _wrapper(self, parameter: str, path: str, like: torch.Tensor | None) -> torch.Tensor:
        """A new wrapper subclass, such as torchao's: only the optimizer can make one. A copy of it, which has nothing
        else, takes a step with a parameter of zeros.
        """
        made = None
        if like is not None:
            stand_in = torch.nn.Parameter(torch.zeros_like(like))
            stand_in.grad = torch.zeros_like(stand_in)
            clone: Any = object.__new__(type(self._live.optimizer))
            # copy.copy() loses attributes of subclasses
            vars(clone).update(vars(self._live.optimizer))
            clone.state = defaultdict(dict)
            clone.param_groups = [{**self._live.held.groups[0].settings, "params": [stand_in]}]
            step = type(clone).step
            getattr(step, "__wrapped__", step)(clone)  # without the hooks
            made = taken_apart(dict(clone.state.get(stand_in, {})))[0].get(path)
        if made is None:
            raise IncompatibleStateError(
                f"{path!r} of the parameter {parameter!r} was saved as a tensor subclass, which "
                f"{type(self._live.optimizer).__qualname__} does not make; load it as plain tensors with load()"
            )
        return made
