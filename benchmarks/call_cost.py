"""What a call of ``async_save`` costs the training thread for each tensor, from the call to its return.

A flat state dict of parameters that an optimizer owns, saved again and again: by this package's ``async_save``, by
``dcp.async_save`` with this package's writer, and by ``dcp.async_save`` with stock's. The three take turns.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dcp_datastates
from machine import describe

WARM_UP = 3


def _own(state: dict[str, Any], path: Path) -> Callable[[], object]:
    return dcp_datastates.async_save(state, path, host_cache_size="512MiB").result


def _by_dcp(state: dict[str, Any], path: Path) -> Callable[[], object]:
    writer = dcp_datastates.DataStatesWriter(path, host_cache_size="512MiB")
    dcp.async_save(state, storage_writer=writer)
    return writer.wait


def _stock(state: dict[str, Any], path: Path) -> Callable[[], object]:
    found: Any = dcp.async_save(state, checkpoint_id=path)
    return found.result


WAYS = {
    "dcp_datastates.async_save": _own,
    "dcp.async_save, DataStatesWriter": _by_dcp,
    "dcp.async_save, stock": _stock,
}


def measure(directory: Path, tensors: int, nbytes: int, saves: int) -> dict[str, float]:
    """Medians, in microseconds for each tensor."""
    parameters = [torch.nn.Parameter(torch.zeros(nbytes // 4)) for _ in range(tensors)]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {f"layer.{n}.weight": parameter.detach() for n, parameter in enumerate(parameters)}
    spent: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(WARM_UP + saves):
        for name, way in WAYS.items():
            path = directory / str(number)
            begun = time.perf_counter()
            wait = way(state, path)
            seconds = time.perf_counter() - begun
            wait()
            shutil.rmtree(path)
            optimizer.step()
            if number >= WARM_UP:
                spent[name].append(1e6 * seconds / tensors)
    return {name: round(median(each), 2) for name, each in spent.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--saves", type=int, default=30)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        rows = {
            f"{nbytes} bytes": measure(Path(directory), arguments.tensors, nbytes, arguments.saves)
            for nbytes in (4 << 10, 64 << 10)
        }
        found = {
            "tensors": arguments.tensors,
            "saves": arguments.saves,
            "microseconds_per_tensor": rows,
            **describe(Path(directory)),
        }
    text = json.dumps(found, indent=1) + "\n"
    sys.stdout.write(text)
    if arguments.output is not None:
        arguments.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
