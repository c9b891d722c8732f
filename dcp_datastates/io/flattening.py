"""The values of a nested state by their names, and the shards that they hold, as DCP sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _init_state_dict
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.key_paths import KeyPath, typed_paths

_TENSORS: Final = (torch.Tensor, torch.nn.Parameter, DTensor)


def flattened(state: dict[str, Any]) -> tuple[dict[str, Any], Mapping[str, KeyPath]]:
    """The values in ``state`` by their names, and where they are, if that is not the name itself at the top.

    Tensors on the meta device get memory, in ``state``, too. Raises :class:`IncompatibleStateError` if two values have
    one name, or a container contains itself.
    """
    # DCP's functions take 10 us for a tensor. Those at the top need none.
    flat: dict[str, Any] = {
        name: value
        for name, value in state.items()
        if type(name) is str and type(value) in _TENSORS and not value.is_meta
    }
    others = {name: value for name, value in state.items() if name not in flat}
    try:
        if others:
            _init_state_dict(others)
            state.update(others)
            found, paths = flatten_state_dict(others)
            if any(isinstance(value, ShardedTensor) for value in found.values()):
                found, paths = flatten_state_dict(_flatten_sharded_tensors(others))
            if twice := next((name for name in found if name in flat), None):
                raise ValueError(f"duplicated flatten key {twice}")
            flat |= found
            return flat, typed_paths(state, {**{name: (name,) for name in flat}, **paths})
        return flat, {}
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
