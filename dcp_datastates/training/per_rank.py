"""Values that differ between ranks: states of random number generators, and positions of data loaders."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcp_datastates.errors import ConfigurationError


class PerRank:
    """Marks an object whose state differs between ranks, such as a data loader that gives each rank other samples.

    The manager stores the state of every rank, and restores each rank's own. ``torch.save`` stores the state with its
    types; it should be small.

    Args:
        wrapped: An object with ``state_dict()`` and ``load_state_dict()``.
        merge: If another number of ranks saved the checkpoint: makes this rank's state of a list of all states that
            were stored, by rank. All ranks call it, each for itself. Without it, such a restore is an
            :class:`IncompatibleStateError`, unless ``missing=`` says otherwise: then the object stays as it is.

    Raises :class:`ConfigurationError` for what has no ``state_dict()``, and for a ``merge`` that cannot be called.
    """

    def __init__(self, wrapped: Stateful, merge: Callable[[list[Any]], Any] | None = None) -> None:
        if isinstance(wrapped, type) or not isinstance(wrapped, Stateful):
            raise ConfigurationError(
                f"PerRank({wrapped!r}): it needs an object with state_dict() and load_state_dict()"
            )
        if merge is not None and not callable(merge):
            raise ConfigurationError(f"merge={merge!r} is no function of a list of states")
        self.wrapped = wrapped
        self.merge = merge

    def __repr__(self) -> str:
        return f"PerRank({type(self.wrapped).__name__})"


class RngState:
    """The states of this rank's random number generators: Python's, NumPy's if it is imported, and torch's on the CPU
    and on the current device. The manager stores them for each rank.
    """

    def __repr__(self) -> str:
        return "RngState()"

    def state_dict(self) -> dict[str, Any]:
        """The states, as plain values and tensors."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": [version, list(words), gauss],
            "torch": torch.get_rng_state(),
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            kind, keys, *rest = numpy.random.get_state()
            state["numpy"] = [kind, keys.tolist(), *rest]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators. What is not in ``state`` stays as it is."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy as np

            kind, keys, *rest = state["numpy"]
            np.random.set_state((kind, np.array(keys, np.uint32), *rest))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def differs(value: Any) -> PerRank | None:
    """``value``, marked, if its state differs between ranks; None for any other value."""
    if isinstance(value, PerRank):
        return value
    return PerRank(value) if isinstance(value, RngState) or _is_loader(value) else None


def _is_loader(value: Any) -> bool:
    """Whether this is a ``StatefulDataLoader`` of torchdata."""
    loaders = sys.modules.get("torchdata.stateful_dataloader")
    return loaders is not None and isinstance(value, loaders.StatefulDataLoader)
