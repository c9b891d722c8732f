"""What uploads cost: put_stream, and others' uploads of the same bytes, in turns, at a server on this machine.

    python benchmarks/stores.py [--gb 0.5] [--turns 7] [--server rclone]

Beside it: bare ``obstore.put``; ``rclone copyto`` of a file in memory; at moto ``s3torchconnector``, if it is installed
(rclone's server answers its requests too early). Prints medians of seconds and of processor seconds (of this process
and the programs that it starts, without the server), per GB, and the ratios.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
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


def processor_seconds() -> float:
    """Of this process, and of the programs that it has started and that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


def cost(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    before, began = processor_seconds(), time.perf_counter()
    call()
    return time.perf_counter() - began, processor_seconds() - before


def rclone(url: str, file: Path) -> Callable[[], object] | None:
    """``rclone copyto`` of ``file``; None without rclone."""
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        return None
    bucket = url.removeprefix("s3://")
    remote = f":s3,provider=Other,env_auth=true,endpoint='{os.environ['AWS_ENDPOINT_URL']}'"
    command = [program, "copyto", str(file), f"{remote}:{bucket}/c", "--ignore-times"]
    options = ["--s3-chunk-size", f"{PART}B", "--s3-upload-concurrency", str(IN_FLIGHT)]
    return lambda: subprocess.run([*command, *options], check=True, capture_output=True)


def connector(url: str, parts: list[memoryview]) -> Callable[[], object] | None:
    """The writer of ``s3torchconnector``; None if it is not installed."""
    try:
        from s3torchconnector import S3Checkpoint, S3ClientConfig
    except ImportError:
        return None
    config = S3ClientConfig(force_path_style=True, part_size=PART)
    checkpoint = S3Checkpoint("us-east-1", os.environ["AWS_ENDPOINT_URL"], s3client_config=config)

    def write() -> None:
        with checkpoint.writer(f"{url}/d") as file:
            for part in parts:
                file.write(bytes(part))

    return write


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
    file = Path(tempfile.mkdtemp(dir="/dev/shm")) / "file"
    file.write_bytes(data)
    if given.server != "azurite":
        others = {"rclone copyto": rclone(store.url, file)}
        if given.server == "moto":
            others["s3torchconnector"] = connector(store.url, parts)
        ways |= {name: way for name, way in others.items() if way is not None}
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
    shutil.rmtree(file.parent)
    for name, (seconds, processor) in medians.items():
        print(f"{name:18} {seconds:7.3f} s/GB   {processor:7.3f} s/GB of the processor")
    ours = medians.pop("put_stream")
    for name, theirs in medians.items():
        time_ratio, processor_ratio = (
            mine / other for mine, other in zip(ours, theirs, strict=True)
        )
        print(
            f"put_stream: {time_ratio:.2f} x the time, {processor_ratio:.2f} x the processor of {name}"
        )


if __name__ == "__main__":
    main()
