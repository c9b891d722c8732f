"""A source that DCP's metadata describe: tensors in chunks, which are read by DCP's own items."""

from __future__ import annotations

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_datastates.conversion.source import Box, Source, shape_of
from dcp_datastates.format.key_paths import EMPTY, with_types
from dcp_datastates.format.validate import check_covered


class DCPSource(Source):
    """A checkpoint that DCP's metadata describe."""

    def _describe(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._entries = dict(metadata.state_dict_metadata)
        self.tensors = {
            name: shape_of(entry.properties.dtype, entry.size)
            for name, entry in self._entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = dict.fromkeys(name for name in self._entries if name not in self.tensors)
        known = with_types(metadata.planner_data)
        self.paths = {
            name: path
            for name, path in (known.items() if isinstance(known, dict) else ())
            if type(path) is tuple and path and (name in self._entries or path[-1] == EMPTY)
            if set(map(type, path)) <= {str, int, tuple}
        }

    def _reads(self, box: Box) -> tuple[torch.Tensor, list[tuple[ReadItem, torch.Tensor]]]:
        """Memory for a box, and the items that fill it, each with its place in there.

        Raises :class:`IncompatibleStateError` unless chunks cover the tensor.
        """
        entry = self._entries[box.name]
        assert isinstance(entry, TensorStorageMetadata)
        way_out = f"leave it out with exclude={box.name!r}"
        check_covered(box.name, entry.size, (chunk.sizes for chunk in entry.chunks), way_out)
        into = torch.empty(box.sizes, dtype=entry.properties.dtype, device="cpu")
        if not into.numel():
            return into, []
        items = create_read_items_for_chunk_list(box.name, entry, [box.chunk])
        return into, [
            (item, narrow_tensor_by_index(into, item.dest_offsets, item.lengths)) for item in items
        ]
