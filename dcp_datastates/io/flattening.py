"""The values of a nested state by their names, and the shards that they hold, as DCP sees them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _init_state_dict
from torch.distributed.checkpoint.utils import find_state_dict_object

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.key_paths import KeyPath, flatten

_DEVICE: Final = operator.attrgetter("device")


def flattened(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """The values in ``state`` by their names, and where they are.

    Tensors on the meta device get memory, in ``state``, too. Raises :class:`IncompatibleStateError` if two values have
    one name, or a container contains itself.
    """
    try:
        values, paths = flatten(state)
        tensors = [each for each in values.values() if isinstance(each, torch.Tensor)]
        if any(device.type == "meta" for device in set(map(_DEVICE, tensors))):
            _init_state_dict(state)
            values, paths = flatten(state)
        if any(issubclass(kind, ShardedTensor) for kind in set(map(type, values.values()))):
            values, paths = flatten(_flatten_sharded_tensors(state))
        return values, paths
    except ValueError as error:
        raise IncompatibleStateError(f"two values of the state have one name: {error}") from error
    except RecursionError as error:
        raise IncompatibleStateError(
            "the state cannot be loaded into: a dict or list in it contains itself"
        ) from error


def shards_as_dcp_sees_them(
    name: str, value: Any
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """Where each shard that this rank has of ``value`` begins, its sizes, in elements, and the shard."""
    for number, chunk in enumerate(_create_chunk_list(value)):
        at = MetadataIndex(name, chunk.offsets, number)
        yield tuple(chunk.offsets), tuple(chunk.sizes), find_state_dict_object({name: value}, at)
