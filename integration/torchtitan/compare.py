"""Checkpoints, stock ones and this package's, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from dcp_datastates import DataStatesReader


def tensors_of(reader: StorageReader) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.full(entry.size, 77, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_same(stock: Path, ours: Path) -> int:
    """The two hold the same names and bits; how many tensors they are."""
    expected = tensors_of(FileSystemReader(str(stock)))
    found = tensors_of(DataStatesReader(ours))
    assert found.keys() == expected.keys()
    assert len(expected) > 100
    different = [
        name
        for name, tensor in expected.items()
        if tensor.dtype != found[name].dtype or not torch.equal(_bits(tensor), _bits(found[name]))
    ]
    assert different == []
    stock_objects = _objects(FileSystemReader(str(stock)))
    assert _objects(DataStatesReader(ours)) == stock_objects
    return len(expected)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _objects(reader: StorageReader) -> set[str]:
    entries = reader.read_metadata().state_dict_metadata
    return {name for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)}
