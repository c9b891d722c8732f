"""Writes checkpoints of stock DCP, which ``FileSystemReader`` reads.

Each chunk is an archive of ``torch.save``; a file holds several, one after another. As in ``write_torch.py``, torch
writes them with holes for the tensors' bytes. Large tensors are cut into chunks: a reader holds a chunk in memory.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dcp_datastates.conversion.output_file import (
    Limits,
    Output,
    OutputFile,
    Placed,
    write_small_file,
)
from dcp_datastates.conversion.read_torch import records_in
from dcp_datastates.conversion.source import Source, TensorInfo, metadata_of_source, shards
from dcp_datastates.conversion.write_torch import save_without_data
from dcp_datastates.format.key_paths import as_dcp_has_them
from dcp_datastates.storage import local

__all__ = ["stock_output"]

_ALIGNMENT: Final = 64
"""Archives begin at a multiple of this, so that their tensors do."""


def stock_output(source: Source, folder: Path, limits: Limits) -> Output:
    """A checkpoint of stock DCP."""
    chunks = {name: list(_cut(info, limits.piece_bytes)) for name, info in source.tensors.items()}
    places: dict[MetadataIndex, _StorageInfo] = {}
    outputs = []
    for number, names in enumerate(shards(source, limits.shard_bytes)):
        path = folder / f"__{number}_0.distcp"
        tensors: list[Placed] = []
        with local.explained("writing", path), path.open("x+b") as stream:
            for name in () if number else source.objects:
                begin = stream.tell()
                stream.write(source.object_bytes(name))
                places[MetadataIndex(name)] = _place(stream, begin)
            for name in names:
                first = 0
                for chunk in chunks[name]:
                    begin = stream.seek(-stream.tell() % _ALIGNMENT, os.SEEK_CUR)
                    tensor = torch.empty(
                        chunk.sizes, dtype=source.tensors[name].dtype, device="cpu"
                    )
                    save_without_data(tensor, stream)
                    (data,) = records_in(stream, str(path))  # of the last archive in it
                    stream.seek(0, os.SEEK_END)
                    places[MetadataIndex(name, chunk.offsets)] = _place(stream, begin)
                    tensors.append(Placed(name, data, first, first + chunk.sizes.numel()))
                    first = tensors[-1].end
        outputs.append(OutputFile(path, path.stat().st_size, (), tensors))
    described = metadata_of_source(source, chunks, places)
    described.planner_data = dict(as_dcp_has_them(described.planner_data))
    metadata = pickle.dumps(described)
    finish = partial(write_small_file, folder / local.METADATA_NAME, metadata)
    return Output(outputs, finish)


def _place(stream: IO[bytes], begin: int) -> _StorageInfo:
    """Of what has been written to ``stream`` from ``begin`` on."""
    return _StorageInfo(Path(stream.name).name, begin, stream.tell() - begin)


def _cut(info: TensorInfo, most: int) -> Iterator[ChunkStorageMetadata]:
    """Chunks of a tensor: as many rows of its first dimension as fit into ``most`` bytes, or one."""
    rows = most // max(1, math.prod(info.shape[1:]) * info.dtype.itemsize) or 1
    if not info.shape or info.shape[0] <= rows:
        yield info.whole
        return
    length, *row = info.shape
    for first in range(0, length, rows):
        offsets, sizes = [first, *[0] * len(row)], [min(rows, length - first), *row]
        yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
