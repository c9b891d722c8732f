"""``Trainable``: the part of a model that training changes, such as the adapters over a frozen base."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.staging.ownership import by_storage

__all__ = ["Trainable"]


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
        for name, value in get_model_state_dict(self.model).items():
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
        set_model_state_dict(self.model, state, options=StateDictOptions(strict=False))


def _storages(tensors: list[torch.Tensor]) -> set[torch.UntypedStorage]:
    return set(by_storage(tensors)[0])
