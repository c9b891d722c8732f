"""Models as objects that DCP saves and loads; and ``Trainable``: the part of a model that training changes. Their names
are the same for a plain, wrapped, compiled or sharded model, and for one model in several parts.

The names are those of ``state_dict()`` and ``named_parameters()``, without what wrappers put into them. Parameters are
matched by identity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.loading.load import check_memory
from dcp_datastates.staging.ownership import by_storage

_WRAPPED: Final = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What ``torch.compile``, activation checkpointing and FSDP1 put before the names of all that they wrap."""

Parameters = Mapping[str, torch.Tensor]
"""Parameters by their names."""


def names_below(names: Iterable[str], prefix: str) -> set[str]:
    """The rest of those ``names`` that lie below ``prefix``."""
    start = f"{prefix}."
    return {name.removeprefix(start) for name in names if name.startswith(start)}


def model_state(modules: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """The tensors and extra states of a model, by name: not copies, but of FSDP1. ``modules`` are its parts, which may
    have buffers in common.

    Raises :class:`ConfigurationError` if two of a module have one name.
    """
    found: dict[str, Any] = {}
    for module in modules:
        wrappers = Wrappers.of(module)
        if wrappers.has_fsdp1:
            state = get_model_state_dict(module)
        else:
            plain = module.state_dict()
            state = dict(zip(wrappers.names(plain), plain.values(), strict=True))
        found.update(state)
    return found


def load_model_state(
    modules: Sequence[torch.nn.Module], state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Give the modules the values of a state by name: those of each.

    Raises :class:`RuntimeError`, as ``load_state_dict()``, for values that do not fit: with ``strict``, also for names
    that are missing or too many.
    """
    left = set(state)
    for module in modules:
        wrappers = Wrappers.of(module)
        if wrappers.has_fsdp1:
            set_model_state_dict(module, dict(state), options=StateDictOptions(strict=strict))
            return
        plain = module.state_dict()
        keys = {name: key for key, name in zip(plain, wrappers.names(plain), strict=True)}
        mine = state if len(modules) == 1 else {n: v for n, v in state.items() if n in keys}
        left -= mine.keys()
        given: Any = OrderedDict((keys.get(name, name), value) for name, value in mine.items())
        # A module without a version takes the values for those of an old one, and may convert them.
        given._metadata = getattr(plain, "_metadata", None)
        module.load_state_dict(given, strict=strict)
    if left and strict:
        raise RuntimeError(f"no part of the model has {sorted(left)}")


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a module by name; one that has several names by the first."""
    plain = dict(module.named_parameters())
    return zip(Wrappers.of(module).names(plain), plain.values(), strict=True)


def fingerprint(models: Mapping[str, Sequence[torch.nn.Module]]) -> tuple[list[Any], list[int]]:
    """What determines the names of the parameters of ``models``: their names by torch, and which objects they are."""
    named = [
        pair for modules in models.values() for each in modules for pair in each.named_parameters()
    ]
    return [*models, *(name for name, _ in named)], [id(each) for _, each in named]


def are_parts(modules: Sequence[torch.nn.Module]) -> bool:
    """Whether modules are parts of one model: no name is that of two parameters."""
    found: dict[str, torch.Tensor] = {}
    return all(
        found.setdefault(name, each) is each
        for module in modules
        for name, each in named_parameters(module)
    )


def parameters_of(
    models: Mapping[str, Sequence[torch.nn.Module]], wanted: Iterable[torch.Tensor]
) -> dict[str, Parameters]:
    """The parameters of those models that have some of ``wanted``, by the models' names. A model that has all of them
    comes alone: the smallest.

    FSDP2 modules are resharded first if their parameters are other objects than the optimizer's, as they are between a
    forward and a backward pass, and after a forward pass without one.
    """
    ids = set(map(id, wanted))
    found = _parameters(models)
    if not ids <= _ids(found.values()):
        _reshard(models)
        found = _parameters(models)
    if complete := [name for name, each in found.items() if ids <= _ids([each])]:
        smallest = min(complete, key=lambda name: len(found[name]))
        return {smallest: found[smallest]}
    return {name: each for name, each in found.items() if ids & _ids([each])}


def _parameters(models: Mapping[str, Sequence[torch.nn.Module]]) -> dict[str, Parameters]:
    return {
        name: {key: each for module in modules for key, each in named_parameters(module)}
        for name, modules in models.items()
    }


def _ids(parameters: Iterable[Parameters]) -> set[int]:
    return {id(each) for some in parameters for each in some.values()}


def _reshard(models: Mapping[str, Sequence[torch.nn.Module]]) -> None:
    for modules in models.values():
        for module in modules:
            for each in module.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()


@dataclass
class Wrappers:
    """What torch has wrapped around a module, or around modules in it."""

    has_fsdp1: bool
    """Whether FSDP1 shards it: torch's functions alone know its names and make its states, which are new tensors."""
    below_ddp: list[str]
    """How the keys begin of what DDP wraps, the innermost first."""

    @staticmethod
    def of(module: torch.nn.Module) -> Wrappers:
        """Looks at all modules."""
        found = Wrappers(False, [])
        for path, each in module.named_modules(remove_duplicate=False):
            if isinstance(each, FullyShardedDataParallel):
                found.has_fsdp1 = True
            elif isinstance(each, DistributedDataParallel):
                start = f"{_without_wrapped(f'{path}.')}module.".removeprefix(".")
                found.below_ddp.insert(0, start)
        return found

    def names(self, keys: Iterable[str]) -> list[str]:
        """The names of ``keys``. Raises :class:`ConfigurationError` if two of them become one."""
        names = [self.name(key) for key in keys]
        if len(set(names)) < len(names):
            double = next(name for name in names if names.count(name) > 1)
            raise ConfigurationError(
                f"without what wrappers add, two values of the model have the name {double!r}; rename one"
            )
        return names

    def name(self, key: str) -> str:
        """The name of a key of ``state_dict()`` or ``named_parameters()``."""
        name = _without_wrapped(key)
        for start in self.below_ddp:
            if name.startswith(start):
                name = start.removesuffix("module.") + name.removeprefix(start)
        return name


def _without_wrapped(key: str) -> str:
    for each in _WRAPPED:
        key = key.replace(each, "")
    return key


_ONCE: Final = "_dcp_datastates_trained"
"""The attribute of the model that has them: another :class:`Trainable` of it knows them, too."""


class Trainable:
    """Stands for a model in a state, with only its trained parameters (``requires_grad``) and its buffers.

    ::

        state = {"adapter": Trainable(model), "optimizer": optimizer}

    A checkpoint then has no frozen parameter, and a restore leaves these as the program made them. The names are those
    of the whole model's state, for sharded, compiled and wrapped models, too. A parameter that was trained once, or
    that was restored, stays part of it, so that a parameter that a schedule freezes again is not lost. Tied parameters
    are stored under every name. It works in a state for the manager, for :func:`async_save` and :func:`load`, and for
    DCP. With FSDP1, whose states are new tensors, it has the whole model.

    Args:
        model: The model.
        buffers: Whether the persistent buffers belong to it. False for a base whose weights are buffers.
        also: The names of further parameters that belong to it, though they are frozen: a reference adapter's, say.

    Raises:
        ConfigurationError: ``model`` is no module.

    Threads: the thread that saves.
    """

    def __init__(
        self, model: torch.nn.Module, *, buffers: bool = True, also: Collection[str] = ()
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(
                f"Trainable() takes a torch.nn.Module, not a {type(model).__name__}"
            )
        self.model = model
        self._buffers = buffers
        self._also = also
        self._once: set[str] = vars(model).setdefault(_ONCE, set())
        """The names of the parameters that were trained at a call before, or that were loaded."""

    def __repr__(self) -> str:
        trained = sum(each.requires_grad for each in self.model.parameters())
        return f"Trainable({type(self.model).__name__}, {trained} trained parameters)"

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name: the model's own, not copies."""
        return self.to_fill(())

    def to_fill(self, stored: Collection[str]) -> dict[str, Any]:
        """:meth:`state_dict`, and the model's tensors of the names in ``stored``."""
        # By memory, not by name: a wrapper changes the names of parameters, but not of a state; tied ones have several.
        parameters = list(self.model.parameters())
        trained = _storages([each for each in parameters if each.requires_grad])
        left_out = _storages([each for each in parameters if not each.requires_grad])
        if not self._buffers:
            left_out |= _storages(list(self.model.buffers()))
        left_out -= trained
        found = {}
        for name, value in model_state([self.model]).items():
            memory = _storages([value]) if isinstance(value, torch.Tensor) else set()
            if memory & trained:
                self._once.add(name)
            named = name in self._once or name in self._also or name in stored
            if named or not memory or memory - left_out:
                found[name] = value
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the model the values of a state, and leave its others as they are."""
        self._once.update(state)
        load_model_state([self.model], state, strict=False)


@dataclass
class ModelPart:
    """A model, in one part or several, or what is trained of one."""

    given: torch.nn.Module | Trainable | Sequence[torch.nn.Module]
    stored: Collection[str] | None = None
    """The names below this part in the checkpoint to load; None for a save."""

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The whole model: its parts."""
        if isinstance(self.given, Trainable):
            return [self.given.model]
        return [self.given] if isinstance(self.given, torch.nn.Module) else list(self.given)

    def state_dict(self) -> dict[str, Any]:
        """The model's tensors by name: not copies, but of FSDP1.

        Raises :class:`ConfigurationError` for a load of a model without memory.
        """
        if isinstance(self.given, Trainable):
            state = self.given.to_fill(self.stored or ())
        else:
            state = model_state(self.modules)
        if self.stored is not None:
            check_memory(state, self.stored)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the model the values of a state."""
        if isinstance(self.given, Trainable):
            self.given.load_state_dict(state)
        else:
            load_model_state(self.modules, state)


def _storages(tensors: list[torch.Tensor]) -> set[torch.UntypedStorage]:
    return set(by_storage(tensors)[0])
