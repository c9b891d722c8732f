"""What one rank's load takes if its state lies otherwise in memory, or on other ranks, than what was saved.

    python benchmarks/resharding.py [--gb 1] [--turns 5] [--dir .]

One process saved 16 whole matrices. This one loads its part of them, as the first of four ranks whose others do not
exist (torch's fake process group), with the page cache dropped before each load. Stock's reader takes turns, from a
checkpoint of its own. Prints medians of seconds, and the time that the raw disk needs for the same bytes over ours.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

import dcp_datastates as ds
from bench.system import drop, sync_tree
from disk import raw_read_rate

ROWS, MATRICES = 4096, 16
State = dict[str, torch.Tensor]


def sharded(state: State, placement: Placement) -> State:
    mesh = init_device_mesh("cpu", (4,))
    found: State = {}
    for name, tensor in state.items():
        part = tensor.chunk(4, placement.dim)[0].clone()  # type: ignore[attr-defined]
        found[name] = DTensor.from_local(part, mesh, [placement], run_check=False)
    return found


TARGETS: dict[str, Callable[[State], State]] = {
    "whole": lambda state: {name: tensor.clone() for name, tensor in state.items()},
    "whole, transposed in memory": lambda state: {
        name: tensor.t().contiguous().t() for name, tensor in state.items()
    },
    "every second column of memory": lambda state: {
        name: torch.zeros(ROWS, 2 * tensor.shape[1])[:, ::2] for name, tensor in state.items()
    },
    "a quarter of the rows": lambda state: sharded(state, Shard(0)),
    "a quarter of the columns": lambda state: sharded(state, Shard(1)),
}


def seconds_of(path: Path, load: Callable[[], object]) -> float:
    drop(path)
    begun = time.perf_counter()
    load()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in (("--gb", 1.0), ("--turns", 5), ("--dir", Path())):
        parser.add_argument(option, type=type(default), default=default)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    columns = int(given.gb * 1e9) // (4 * ROWS * MATRICES) // 4 * 4
    saved = {f"w{number}": torch.randn(ROWS, columns) for number in range(MATRICES)}
    with tempfile.TemporaryDirectory(dir=given.dir) as directory:
        ours, stock = Path(directory, "ours"), Path(directory, "stock")
        ds.save(saved, ours)
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(stock))  # type: ignore[attr-defined]
        sync_tree(Path(directory))
        (file,) = ours.rglob("*.safetensors")
        dist.init_process_group("fake", rank=0, world_size=4)
        for name, target in TARGETS.items():
            state = target(saved)
            local = [
                each.to_local() if isinstance(each, DTensor) else each for each in state.values()
            ]
            nbytes = sum(each.numel() * each.element_size() for each in local)

            def by_stock(state: State = state) -> None:
                reader = dcp.FileSystemReader(stock)  # type: ignore[attr-defined]
                dcp.load(state, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]

            found: dict[str, list[float]] = {"ours": [], "stock": [], "raw": []}
            for _ in range(given.turns):
                found["ours"].append(
                    seconds_of(ours, lambda: ds.load(ours, state, no_dist=True))  # noqa: B023
                )
                found["stock"].append(seconds_of(stock, by_stock))
                found["raw"].append(nbytes / raw_read_rate(file))
            mine, theirs, raw = map(statistics.median, found.values())
            print(
                f"{name}: {mine:.2f} s, {100 * raw / mine:.0f} % of raw; stock {theirs:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
