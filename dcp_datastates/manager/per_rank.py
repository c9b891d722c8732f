"""Values that differ between ranks: states of random number generators, and positions of data loaders."""

from __future__ import annotations

import io
import random
import sys
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

__all__ = ["PerRank", "RngState", "differs", "packed", "unpack"]


class PerRank:
    """Marks an object of which each rank has its own state: a data loader that gives each rank other samples, say.

    The manager stores the state of every rank, and gives each rank its own back. If the number of ranks has changed,
    none of the states fits any rank: then the object stays as it is, and a warning says so. The state is stored as it
    is, with its types, by ``torch.save``: it should be small.

    Args:
        wrapped: an object with ``state_dict()`` and ``load_state_dict()``.
    """

    def __init__(self, wrapped: Stateful) -> None:
        self.wrapped = wrapped


class RngState:
    """The states of this rank's random number generators: Python's, NumPy's if it is imported, and torch's on the CPU
    and on the current device. The manager stores them for each rank.
    """

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


def differs(value: Any) -> Stateful | None:
    """The object whose state each rank has for itself; None for any other value."""
    if isinstance(value, PerRank):
        return value.wrapped
    if isinstance(value, RngState):
        return value
    loaders = sys.modules.get("torchdata.stateful_dataloader")
    if loaders is not None and isinstance(value, loaders.StatefulDataLoader):
        return value  # type: ignore[no-any-return]
    return None


def packed(value: Stateful) -> bytes:
    """The state of ``value``, with its types."""
    buffer = io.BytesIO()
    torch.save(value.state_dict(), buffer)
    return buffer.getvalue()


def unpack(value: Stateful, data: bytes) -> None:
    """Give ``value`` the state that :func:`packed` packed."""
    value.load_state_dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=False))
