"""What it costs four ranks with the same state to load it, with share_reads and without, in turns.

    python benchmarks/shared_reads.py [--gb 0.5] [--turns 5] [--rate 300]

The store is rclone's S3 server on this machine. All ranks' reads together get --rate MB/s of it (0: no limit). The
disk is that of the temporary directory, and its cache is dropped before each load. Prints medians of seconds.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.stores.kinds import new_store

import dcp_datastates as ds
from dcp_datastates.storage.object_path import locate

WORLD = 4


def run(rank: int, directory: str, url: str, gb: float, turns: int, rate: float) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/g", rank=rank, world_size=WORLD
    )
    torch.set_num_threads(1)
    state = {f"w{n}": torch.randn(int(gb * 1e9) // 64) for n in range(16)}
    store, turn = locate(url).store, os.open(f"{directory}/turn", os.O_CREAT | os.O_RDWR)
    get_range = store.get_range

    def limited(key: str, begin: int, end: int) -> object:
        with open(f"{directory}/turn") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep((end - begin) / rate / 1e6 if rate else 0)
        return get_range(key, begin, end)

    store.get_range = limited
    os.close(turn)
    for place in (f"{url}/c", f"{directory}/c"):
        ds.save(state, place, host_cache_size="256MiB")
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * turns + 2):
            for file in Path(directory).rglob("*.safetensors") if rank == 0 else ():
                with file.open("rb") as data:
                    os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            dist.barrier()
            began = time.perf_counter()
            ds.load(place, state, share_reads=number % 2 == 0)
            seconds[number % 2 == 0].append(time.perf_counter() - began)
        if rank == 0:
            on, off = (statistics.median(seconds[share][1:]) for share in (True, False))
            print(
                f"{place.partition(':')[0][:2]:3} shared {on:.2f} s, not shared {off:.2f} s, {off / on:.2f} x"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rate", type=float, default=300.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        path = os.path.abspath(directory)
        arguments = (path, new_store("rclone").url, given.gb, given.turns, given.rate)
        torch.multiprocessing.spawn(run, arguments, nprocs=WORLD)
