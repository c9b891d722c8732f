"""Which plain tensors are the same on all ranks that hold them, as far as anything says so.

A DTensor says it of its replicas. A plain tensor says nothing of other ranks' tensors of its name: batch-norm
statistics and other state of a rank have the same names everywhere. But what an optimizer owns, data-parallel
training keeps the same.
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
    """``items``, with the large plain tensors that an optimizer owns as items of type SHARD: as chunks, of which
    replicas are equal.

    Args:
        items: of a default planner.
        state_dict: what they are of, flattened.
        staged: of that state, if there is one: its tensors may be copies by now.
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
    """Whether it is a plain tensor that is large enough to be cut."""
    data = item.tensor_data
    if item.type is not WriteItemType.TENSOR or data is None:
        return False
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize >= SPLIT_FROM
