"""How long four ranks with the same state load it, with share_reads and without, in turns.

    python benchmarks/shared_reads.py [--gb 0.5] [--turns 5] [--rate 300]

The store is an S3 server on this machine (moto); all ranks together get --rate MB/s from it. The disk is that of the
working directory, first with its cache dropped before each load, then with it. Prints medians of seconds.
"""

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


def run(rank: int, directory: Path, url: str, given: argparse.Namespace) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/g", rank=rank, world_size=4)
    torch.set_num_threads(1)
    state = {f"w{n}": torch.randn(int(given.gb * 1e9) // 64) for n in range(16)}
    store = locate(url).store
    get_range = store.get_range

    def limited(key: str, begin: int, end: int) -> object:
        with Path(directory, "turn").open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            time.sleep((end - begin) / given.rate / 1e6)
        return get_range(key, begin, end)

    store.get_range = limited  # type: ignore[method-assign, assignment]
    for name, place in {"store": url, "disk": directory, "cached": directory}.items():
        ds.save(state, f"{place}/{name}", host_cache_size="256MiB")
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * given.turns + 2):
            for file in directory.rglob("*.safetensors") if name == "disk" and not rank else ():
                with file.open("rb") as data:
                    os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            dist.barrier()
            began = time.perf_counter()
            ds.load(f"{place}/{name}", state, share_reads=number % 2 == 0)
            seconds[number % 2 == 0].append(time.perf_counter() - began)
        on, off = (statistics.median(seconds[shared][1:]) for shared in (True, False))
        if rank == 0:
            print(f"{name}: shared {on:.2f} s, each for itself {off:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option, default in (("--gb", 0.5), ("--turns", 5), ("--rate", 300.0)):
        parser.add_argument(option, type=type(default), default=default)
    with tempfile.TemporaryDirectory(dir=".") as path:
        url = new_store("moto").url
        torch.multiprocessing.spawn(run, (Path(path).resolve(), url, parser.parse_args()), nprocs=4)
