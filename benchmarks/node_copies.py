"""How fast a file is copied to another node's directory (``node://``), beside rsync and the disk, in turns.

    python benchmarks/node_copies.py [--gb 1.0] [--turns 5]

The other node is a process on this machine, and its directory lies on the disk of the working directory. All copies
read one file from the page cache, and end when the bytes are on the disk. ``rsync`` copies between two directories; if
it is not installed, ``cp`` does. Prints medians of MB/s. With a certificate in ``DCP_DATASTATES_SECRET_FILE``, the
bytes are encrypted.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from dcp_datastates.tiers.node import OtherNode, serve
from dcp_datastates.tiers.node_files import NodeFiles
from dcp_datastates.tiers.pace import Pace
from dcp_datastates.wire.secret import Address
from disk import raw_write_rate

_PIECE_BYTES = 8 << 20


def be_other_node(directory: Path, parent: Connection) -> None:
    parent.send(tuple(serve(NodeFiles("other", directory, sync=True), "127.0.0.1").address))
    parent.recv()


def copy_to_node(node: OtherNode, source: Path) -> None:
    with contextlib.closing(node.unpublished("copy")) as copy, source.open("rb", 0) as file:
        while piece := file.read(_PIECE_BYTES):
            copy.write(piece)
        copy.complete()
        copy.publish(if_absent=False)


def copy_by_program(program: list[str], source: Path, target: Path) -> None:
    subprocess.run([*program, source, target], check=True)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def main(directory: Path, given: argparse.Namespace) -> None:
    source, target, nbytes = directory / "source", directory / "target", int(given.gb * 1e9)
    source.write_bytes(os.urandom(1 << 20) * (nbytes >> 20))
    nbytes = source.stat().st_size
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=be_other_node, args=(directory / "other", there), daemon=True)
    other.start()
    node = OtherNode("other", [Address(*here.recv())], Pace())
    program = ["rsync", "--whole-file"] if shutil.which("rsync") else ["cp"]

    def rate_of(copy: Callable[[], object]) -> float:
        began = time.perf_counter()
        copy()
        return nbytes / (time.perf_counter() - began)

    ways: dict[str, Callable[[], float]] = {
        "another node": lambda: rate_of(lambda: copy_to_node(node, source)),
        program[0]: lambda: rate_of(lambda: copy_by_program(program, source, target)),
        "raw disk": lambda: raw_write_rate(directory, nbytes),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.turns):
        for name, measure in ways.items():
            rates[name].append(measure())
            target.unlink(missing_ok=True)
            node.delete(["copy"])
    here.send("end")
    for name, found in rates.items():
        print(f"{name:>12}: {statistics.median(found) / 1e6:6.0f} MB/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option, default in (("--gb", 1.0), ("--turns", 5)):
        parser.add_argument(option, type=type(default), default=default)
    with tempfile.TemporaryDirectory(dir=".") as path:
        main(Path(path).resolve(), parser.parse_args())
