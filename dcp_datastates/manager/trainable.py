"""Models as objects that DCP saves and loads, and ``Trainable``: the part of a model that training changes, such as the
adapters over a frozen base.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.distributed.fsdp import FSDPModule

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.manager.naming import device_of, load_model_state, model_state
from dcp_datastates.staging.ownership import by_storage

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
    _left: frozenset[str] = field(default_factory=frozenset)
    """The names of what is on the meta device, and not stored: it stays there."""

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The whole model: its parts."""
        if isinstance(self.given, Trainable):
            return [self.given.model]
        return [self.given] if isinstance(self.given, torch.nn.Module) else list(self.given)

    def state_dict(self) -> dict[str, Any]:
        """The model's tensors by name: not copies, but of FSDP1. For a load, those on the meta device get memory.

        Raises :class:`ConfigurationError` for FSDP2 on the meta device.
        """
        if isinstance(self.given, Trainable):
            state = self.given.to_fill(self.stored or ())
        else:
            state = model_state(self.modules)
        if self.stored is None:
            return state
        meta = {n for n, each in state.items() if isinstance(each, torch.Tensor) and each.is_meta}
        if meta and any(isinstance(e, FSDPModule) for part in self.modules for e in part.modules()):
            raise ConfigurationError(
                "the model is on the meta device, and sharded by FSDP2; give it memory before the restore, with "
                "model.to_empty(device=…)"
            )
        self._left = frozenset(meta - set(self.stored))
        return {n: _with_memory(each) if n in meta else each for n, each in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the model the values of a state."""
        state = {name: value for name, value in state.items() if name not in self._left}
        if isinstance(self.given, Trainable):
            self.given.load_state_dict(state)
        else:
            load_model_state(self.modules, state, strict=not self._left)


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device=device_of(tensor), requires_grad=False)


def _storages(tensors: list[torch.Tensor]) -> set[torch.UntypedStorage]:
    return set(by_storage(tensors)[0])
