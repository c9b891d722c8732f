"""Plans made by hand: items of tensors, of replicas and of objects, and the plans of ranks that have them."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_datastates.planning.messages import LocalPlan
from support.state.chunks import Box, item


def replica(name, shape):
    """A tensor that is the same on all ranks that have it."""
    return item(name, shape, Box((0,) * len(shape), shape))


def thing(name):
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def plan(*items, mappings=None):
    return LocalPlan.of(items, mappings)


def with_hints(items):
    """MetadataIndex compares neither hints nor that there are none."""
    return [(item, item.index.index) for item in items]
