"""Which plain tensors are declared equal on all ranks that hold them.

A DTensor declares that its replicas are equal. A plain tensor declares nothing about other ranks' tensors of the same
name: batch-norm statistics and other per-rank state have the same names on all ranks. But data-parallel training keeps
tensors equal that an optimizer owns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_datastates.io.tensor_memory import local_tensor
from dcp_datastates.planning.balance import SPLIT_FROM
from dcp_datastates.staging.ownership import Ownership, known_optimizers
from dcp_datastates.staging.stage import StagedState

__all__ = ["declared"]


def declared(
    items: Sequence[WriteItem], state_dict: Mapping[str, Any], staged: StagedState | None
) -> list[WriteItem]:
    """``items``, with the large plain tensors that an optimizer owns turned into items of type SHARD: chunks, whose
    replicas are equal.

    Args:
        items: the items of a default planner.
        state_dict: the state that they plan, flattened.
        staged: the staged state, if there is one: the tensors in ``state_dict`` may be copies by now.
    """
    large = [each.index.fqn for each in items if _is_large(each)]
    if not large:
        return list(items)
    if staged is not None:
        columns = staged.traversal.columns
        owned = {columns.name(at) for at, is_owned in enumerate(staged.owned()) if is_owned}
    else:
        tensors = [local_tensor(state_dict[name]) for name in large]
        owned = set(compress(large, Ownership(known_optimizers()).owns(tensors)))
    return [
        dataclasses.replace(each, type=WriteItemType.SHARD)
        if each.index.fqn in owned and _is_large(each)
        else each
        for each in items
    ]


def _is_large(item: WriteItem) -> bool:
    """Whether the item is a plain tensor that is large enough to be cut."""
    data = item.tensor_data
    if item.type is not WriteItemType.TENSOR or data is None:
        return False
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize >= SPLIT_FROM
