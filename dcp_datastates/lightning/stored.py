"""How a checkpoint of Lightning is stored, and what Lightning's own strategies would have saved.

In a checkpoint of this package lie the model under ``state_dict``, optimizers by names of parameters under
``optimizer_0``, …, and all else, pickled by each rank, under ``files``. In Lightning's file, an optimizer lies as its
``state_dict()`` gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dcp_datastates.format.optimizer_state import packed_optimizer

MODEL: Final = "state_dict"
OPTIMIZERS: Final = "optimizer_states"
META: Final = "meta.pt"
"""The name of the file with all else that Lightning saves."""

FURTHER_TENSORS: Final = "dcp_datastates_tensors"
"""The key, in that file, of the names of further states that are tensors, such as those of ``WeightAveraging``."""
NAMES: Final = "dcp_datastates_names"
"""The key of the model's own names of those values whose names here are others: ``torch.compile`` adds to them."""

COUNT: Final = "dcp_datastates_optimizers"
"""The key of the number of optimizers."""


def optimizer_name(number: int) -> str:
    """Under which name an optimizer is stored."""
    return f"optimizer_{number}"


def lightning_checkpoint(stored: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning's own strategies would have saved.

    Args:
        stored: The nested state in the checkpoint. Parts of it may be left out.
        meta: What lies in the file :data:`META`.
    """
    found = dict(meta)
    own = found.pop(NAMES, {})
    further, optimizers = found.pop(FURTHER_TENSORS, ()), found.pop(COUNT, 0)
    found |= {name: stored[name] for name in further if name in stored}
    found[MODEL] = {own.get(name, name): value for name, value in stored.get(MODEL, {}).items()}
    if "lr_schedulers" in found:  # else ``save_weights_only``
        found[OPTIMIZERS] = [
            packed_optimizer(stored.get(optimizer_name(number), {})) for number in range(optimizers)
        ]
    return found
