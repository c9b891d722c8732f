"""What uploads cost: put_stream, and bare puts of the same bytes, in turns, at a server on this machine.

    python benchmarks/stores.py [--gb 0.5] [--turns 7] [--server rclone]

Prints medians of seconds and of this process's processor seconds, per GB, and the ratios.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import obstore
from obstore.store import from_url

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.stores.kinds import new_store

from dcp_datastates.storage.obstore_adapter import ObstoreStore

PART = 8 << 20
IN_FLIGHT = 4


def cost(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--server", choices=["moto", "rclone", "azurite"], default="rclone")
    given = parser.parse_args()
    nbytes = int(given.gb * 1e9) // PART * PART
    data = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    parts = [memoryview(data[begin : begin + PART]) for begin in range(0, nbytes, PART)]
    store = new_store(given.server)
    assert isinstance(store, ObstoreStore)
    bare = from_url(store.url, client_options={"allow_http": True})

    def stream() -> None:
        store.put_stream("a", iter(parts), part_bytes=PART, parts_in_flight=IN_FLIGHT)

    def put(content: bytes | Iterator[memoryview]) -> None:
        obstore.put(
            bare, "b", content, use_multipart=True, chunk_size=PART, max_concurrency=IN_FLIGHT
        )

    whole = data.tobytes()
    ways = {
        "put_stream": stream,
        "bare put": lambda: put(whole),  # obstore copies it part by part
        "bare put of parts": lambda: put(iter(parts)),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(given.turns + 1):
        for name, way in ways.items():
            figures = cost(way)
            if turn:  # the first warms up
                found[name].append(figures)
    medians = {
        name: [statistics.median(column) / nbytes * 1e9 for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }
    for name, (seconds, processor) in medians.items():
        print(f"{name:18} {seconds:7.3f} s/GB   {processor:7.3f} s/GB of the processor")
    ours = medians.pop("put_stream")
    for name, others in medians.items():
        time_ratio, processor_ratio = (
            mine / other for mine, other in zip(ours, others, strict=True)
        )
        print(
            f"put_stream: {time_ratio:.2f} x the time, {processor_ratio:.2f} x the processor of {name}"
        )


if __name__ == "__main__":
    main()
