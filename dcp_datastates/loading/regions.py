"""Boxes of tensors: what a rank holds of one, and what it needs of the stored chunks."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.stored_names import Box
from dcp_datastates.io.tensor_memory import holds_shards
from dcp_datastates.io.wrappers import box

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def shards_of(name: str, value: Any) -> list[tuple[Box, torch.Tensor]]:
    """What this rank holds of a tensor of the state: the box of each part, and its memory. Empty outside a mesh."""
    if type(value) in PLAIN and not holds_shards(value):
        return [(tuple((0, size) for size in value.shape), value)]
    if type(value) is DTensor and type(value._local_tensor) in PLAIN:
        if is_elsewhere(value):
            return []
        if any(placement.is_partial() for placement in value.placements):
            raise IncompatibleStateError(
                f"{name!r} cannot be loaded: the state has partial sums of it ({value.placements}); redistribute() it"
            )
        return [(box(value), value._local_tensor)]
    found = []
    for number, chunk in enumerate(_create_chunk_list(value)):
        place = tuple((o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        tensor = find_state_dict_object({name: value}, MetadataIndex(name, chunk.offsets, number))
        found.append((place, tensor))
    return found


def is_elsewhere(value: Any) -> bool:
    """Whether it is a DTensor of whose mesh this rank is no part: it holds nothing of it."""
    return isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None


def overlap(one: Box, other: Box) -> Box:
    """What two boxes have in common; dimensions may end before they begin."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def volume(place: Box) -> int:
    """The number of elements."""
    return math.prod(end - begin for begin, end in place)


def cut(tensor: torch.Tensor, place: Box, part: Box) -> torch.Tensor:
    """The ``part`` of a tensor that lies at ``place``."""
    for dimension, ((origin, stop), (begin, end)) in enumerate(zip(place, part, strict=True)):
        if (begin, end) != (origin, stop):
            tensor = tensor.narrow(dimension, begin - origin, end - begin)
    return tensor
