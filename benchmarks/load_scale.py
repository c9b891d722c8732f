"""What the load of a large job's checkpoint costs one rank before it reads a byte, beside the size of its metadata.

    python benchmarks/load_scale.py [--ranks 64 1024 16384]

900 tensors of two dimensions, each sharded by rows over all ranks (FSDP), in float32, with no data: what one rank does
in a load is to read and check the metadata, and to look up what it needs of each tensor. It loads as one of as many
ranks, and as one of half as many. Each row runs in a process of its own; seconds of processor time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates.format.layout import file_bytes
from dcp_datastates.format.metadata import decode, encode
from dcp_datastates.format.metadata_table import (
    Catalog,
    FileRecord,
    MetadataTable,
    Note,
    Placement,
)
from dcp_datastates.loading.stored import Shards, Stored
from dcp_datastates.storage.attempt import Attempt

TENSORS, ROWS, COLUMNS = 900, 2, 64
"""Each rank has so many rows of each tensor."""


def table(ranks: int) -> MetadataTable:
    nbytes = 4 * ROWS * COLUMNS
    chunks = TENSORS * ranks
    rank = np.tile(np.arange(ranks), TENSORS)
    of_tensor = np.repeat(np.arange(TENSORS), ranks)
    catalog = Catalog(
        names=tuple(f"model.layers.{number}.weight" for number in range(TENSORS)),
        table=(TensorProperties(torch.float32),),
        properties=np.zeros(TENSORS, np.int64),
        ndims=np.full(TENSORS, 2),
        shapes=np.tile([ranks * ROWS, COLUMNS], TENSORS),
        counts=np.full(TENSORS, ranks),
        offsets=np.stack([rank * ROWS, np.zeros_like(rank)], axis=1).ravel(),
        sizes=np.tile([ROWS, COLUMNS], chunks),
        mappings=None,
    )
    attempt = Attempt.parse("0000000000000001-00000001")
    assert attempt is not None
    end = 4096 + TENSORS * nbytes
    records = [
        FileRecord(f"{attempt.name}/rank-{n}.data", file_bytes(end), end) for n in range(ranks)
    ]
    files = {record.relative_path: record for record in records}
    placement = Placement(tuple(files), rank, 4096 + of_tensor * nbytes, np.full(chunks, nbytes))
    return MetadataTable(catalog, placement, Note(attempt, files, None, {}, 1.0, None))


def shards(parts: int, ranks: int) -> Shards:
    """What one of ``parts`` ranks holds."""
    rows = ranks * ROWS // parts
    return Shards(
        np.arange(TENSORS),
        np.full(TENSORS, 2),
        np.tile([rows * (parts // 2), 0], TENSORS),
        np.tile([rows, COLUMNS], TENSORS),
        [torch.empty(rows, COLUMNS) for _ in range(TENSORS)],
    )


def measure(ranks: int, data: bytes) -> tuple[float, list[float], float]:
    """Seconds to open, and to plan as one of as many and of half as many ranks; and GiB of memory at most."""
    path = Path("checkpoint")
    begun = time.process_time()
    stored = Stored(decode(data, path), [path])
    opened = time.process_time() - begun
    planned = []
    for parts in (ranks, ranks // 2):
        held = shards(parts, ranks)
        begun = time.process_time()
        found = stored.into(list(stored), held)
        planned.append(time.process_time() - begun)
        assert len(found) == TENSORS * ranks // parts
    return opened, planned, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 16384])
    print("  ranks  metadata    open    plan    plan, half as many ranks    memory at most")
    for ranks in parser.parse_args().ranks:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            data = pool.apply(_encoded, [ranks])
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            opened, (same, half), memory = pool.apply(measure, [ranks, data])
        print(
            f"{ranks:7,} {len(data) / 1e6:6.1f} MB {opened:5.2f} s {same:5.2f} s {half:25.2f} s {memory:13.1f} GiB"
        )


def _encoded(ranks: int) -> bytes:
    return encode(table(ranks))


if __name__ == "__main__":
    main()
