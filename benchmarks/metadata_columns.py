"""What writing and reading a large checkpoint's metadata takes: as columns, and as objects through pickle.

``python benchmarks/metadata_columns.py [--ranks 1024] [--tensors 900] [--json results/metadata-….json]``: each
tensor is sharded in its first dimension over all ranks. Rows take turns; of each the median counts. Garbage
collection is on, as it is in a job.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties

from dcp_datastates.format.checksums import file_bytes
from dcp_datastates.format.chunk_table import Catalog, FileRecord, Placement
from dcp_datastates.format.metadata import MetadataTable, Note, decode, encode
from dcp_datastates.format.metadata_columns import table_of
from dcp_datastates.format.metadata_objects import metadata_of
from dcp_datastates.storage.attempt import Attempt
from machine import describe

BF16 = TensorProperties(torch.bfloat16)
META = StorageMeta("a checkpoint")
VERSION = "1.0.0"


def columns(ranks: int, tensors: int) -> tuple[Catalog, Placement]:
    """A model of repeated layers, nine tensors each; every rank writes one file."""
    kind = np.arange(tensors) % 9
    rows = np.array([8, 16, 4, 32, 8, 16, 4, 2, 8])[kind]
    width = np.array([8192, 4096, 1024, 512, 8192, 8192, 28672, 7168, 128])[kind]
    sizes = np.empty((tensors, ranks, 2), np.int64)
    sizes[:, :, 0], sizes[:, :, 1] = rows[:, None], width[:, None]
    offsets = np.zeros_like(sizes)
    offsets[:, :, 0] = rows[:, None] * np.arange(ranks)
    lengths = sizes.prod(axis=2) * 2
    names = tuple(f"model.layers.{i // 9}.block{i % 9}.weight" for i in range(tensors))
    catalog = Catalog(
        names=names,
        table=(BF16,),
        properties=np.zeros(tensors, np.int64),
        ndims=np.full(tensors, 2),
        shapes=np.stack([rows * ranks, width], axis=1).ravel(),
        counts=np.full(tensors, ranks),
        offsets=offsets.ravel(),
        sizes=sizes.ravel(),
        mappings={name: tuple(name.split(".")) for name in names},
    )
    none = np.empty(0, np.int64)
    placement = Placement(
        paths=tuple(f"0000000000000000-00000000/__{rank}_0.distcp" for rank in range(ranks)),
        chunk_files=np.tile(np.arange(ranks), tensors),
        chunk_offsets=(np.cumsum(lengths, axis=0) - lengths).ravel(),
        chunk_lengths=lengths.ravel(),
        object_files=none,
        object_offsets=none,
        object_lengths=none,
    )
    return catalog, placement


def table(catalog: Catalog, placement: Placement) -> MetadataTable:
    """With the files that the places need."""
    ends = np.zeros(len(placement.paths), np.int64)
    np.maximum.at(ends, placement.chunk_files, placement.chunk_offsets + placement.chunk_lengths)
    files = {
        path: FileRecord(path, file_bytes(end), end)
        for path, end in zip(placement.paths, ends.tolist(), strict=True)
    }
    return MetadataTable(catalog, placement, Note(Attempt(1, 1), files), META, VERSION)


def rows(given: MetadataTable, path: Path) -> dict[str, Callable[[], Any]]:
    """What is measured, by what it is called."""
    data = encode(given)
    path.write_bytes(data)
    stock = path.with_name("stock")
    stock.write_bytes(pickle.dumps(metadata_of(given)))
    objects: Metadata = unpickled(stock)
    # The same with nothing known of it: what a catalog is checked for is remembered.
    return {
        "write, a new plan": lambda: encode(
            MetadataTable(copy.copy(given.catalog), given.placement, given.note, given.storage_meta)
        ),
        "write, a known plan": lambda: encode(given),
        "write, of another planner's objects": lambda: encode(table_of(objects, given.note)),
        "stock: pickle.dumps of objects": lambda: pickle.dumps(objects),
        "read": lambda: metadata_of(decode(path.read_bytes(), path)),
        "read, and make every entry": lambda: list(
            metadata_of(decode(path.read_bytes(), path)).state_dict_metadata.values()
        ),
        "stock: pickle.load": lambda: unpickled(stock),
    }


def unpickled(path: Path) -> Any:
    """As ``FileSystemReader`` does it."""
    with path.open("rb") as file:
        return pickle.load(file)


def pickle_bytes(path: Path) -> int:
    """How long the pickle at the beginning of the file is."""
    with path.open("rb") as file:
        pickle.load(file)
        return file.tell()


def measured(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            gc.collect()
            begun = time.perf_counter()
            result = call()
            seconds[name].append(time.perf_counter() - begun)
            del result
    return seconds


def main() -> None:
    """Print a row for each call, and write them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=900)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    given = table(*columns(options.ranks, options.tensors))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, ".metadata")
        calls = rows(given, path)
        seconds = measured(calls, options.repeats)
        sizes = {
            "file": path.stat().st_size,
            "its pickle": pickle_bytes(path),
            "stock": len(calls["stock: pickle.dumps of objects"]()),
        }
        record = {
            **describe(Path(directory)),
            "benchmark": "metadata",
            "ranks": options.ranks,
            "tensors": options.tensors,
            "chunks": options.ranks * options.tensors,
            "bytes": sizes,
            "rows": [
                {"what": name, "median_seconds": round(statistics.median(each), 4), "seconds": each}
                for name, each in seconds.items()
            ],
        }
    for name, each in seconds.items():
        print(f"{name:40} {statistics.median(each):8.3f} s   ({min(each):.3f} to {max(each):.3f})")
    for name, nbytes in sizes.items():
        print(f"{name:40} {nbytes / 1e6:8.1f} MB")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
