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
from dcp_datastates.staging.ownership import Ownership, known_optimizers
from dcp_datastates.staging.stage import StagedState

__all__ = ["declared"]


def declared(
    items: Sequence[WriteItem], state_dict: Mapping[str, Any], staged: StagedState | None
) -> list[WriteItem]:
    """``items``, with the plain tensors that an optimizer owns turned into items of type SHARD: chunks, whose replicas
    are equal.

    Args:
        items: the items of a default planner.
        state_dict: the state that they plan, flattened.
        staged: the staged state, if there is one: the tensors in ``state_dict`` may be copies by now.
    """
    plain = [each.index.fqn for each in items if each.type is WriteItemType.TENSOR]
    if staged is not None:
        columns = staged.traversal.columns
        owned = {columns.name(at) for at, is_owned in enumerate(staged.owned()) if is_owned}
    else:
        tensors = [local_tensor(state_dict[name]) for name in plain]
        owned = set(compress(plain, Ownership(known_optimizers()).owns(tensors)))
    return [
        dataclasses.replace(each, type=WriteItemType.SHARD)
        if each.type is WriteItemType.TENSOR and each.index.fqn in owned
        else each
        for each in items
    ]
