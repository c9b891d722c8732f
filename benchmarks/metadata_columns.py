"""What writing a large checkpoint's metadata takes: from columns, and as objects through pickle.

``python benchmarks/metadata_columns.py [--ranks 1024] [--tensors 900]``: each tensor is sharded in its first
dimension over all ranks. Garbage collection is off while anything is timed, as in ``metadata.decode``.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates._native import scan_pickle
from dcp_datastates.format.chunk_table import Catalog, Placement
from dcp_datastates.format.metadata_pickle import emit

BF16 = TensorProperties(torch.bfloat16)
META = StorageMeta("a checkpoint")
VERSION = "1.0.0"
NOTE = {"version": 1}


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


def objects(catalog: Catalog, placement: Placement) -> Metadata:
    """The same for 2-d tensors, as DCP makes it."""
    state: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    shapes = catalog.shapes.reshape(-1, 2).tolist()
    offsets = iter(catalog.offsets.reshape(-1, 2).tolist())
    sizes = iter(catalog.sizes.reshape(-1, 2).tolist())
    files = iter(placement.chunk_files.tolist())
    stored = iter(
        zip(placement.chunk_offsets.tolist(), placement.chunk_lengths.tolist(), strict=True)
    )
    for name, shape, count in zip(catalog.names, shapes, catalog.counts.tolist(), strict=True):
        chunks = [
            ChunkStorageMetadata(torch.Size(next(offsets)), torch.Size(next(sizes)))
            for _ in range(count)
        ]
        state[name] = TensorStorageMetadata(BF16, torch.Size(shape), chunks)
        for i, chunk in enumerate(chunks):
            place = _StorageInfo(placement.paths[next(files)], *next(stored))
            places[MetadataIndex(name, chunk.offsets, i)] = place
    metadata = Metadata(state, dict(catalog.mappings or {}), places, META, VERSION)
    vars(metadata)["dcp_datastates"] = NOTE
    return metadata


def timed(what: str, call: Callable[[], Any], repeats: int) -> Any:
    """What ``call`` returned; prints its best time, and how long another thread waited for the GIL at most."""
    best, longest = float("inf"), 0.0
    for _ in range(repeats):
        stop = threading.Event()
        gaps: list[float] = []

        def tick(stop: threading.Event = stop, gaps: list[float] = gaps) -> None:
            last = time.perf_counter()
            while not stop.is_set():
                time.sleep(0.0005)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        ticking = threading.Thread(target=tick)
        ticking.start()
        begun = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - begun)
        stop.set()
        ticking.join()
        longest = max(longest, *gaps)
    size = f"{len(result) / 1e6:8.1f} MB" if isinstance(result, bytes) else " " * 11
    print(f"{what:32} {best:8.3f} s {size}   another thread waited up to {longest * 1e3:7.1f} ms")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=900)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    catalog, placement = columns(given.ranks, given.tensors)
    gc.disable()
    emitted = timed("emit", lambda: emit(catalog, placement, META, VERSION, NOTE), given.repeats)
    timed("scan_pickle of it", lambda: scan_pickle(emitted), given.repeats)
    loaded = timed("pickle.loads of it", lambda: pickle.loads(emitted), 1)
    made = timed("objects", lambda: objects(catalog, placement), 1)
    if loaded != made:
        raise SystemExit("what was emitted is not what the objects are")
    del loaded
    pickled = timed("pickle.dumps of them", lambda: pickle.dumps(made), 1)
    timed("pickle.loads of that", lambda: pickle.loads(pickled), 1)


if __name__ == "__main__":
    main()
