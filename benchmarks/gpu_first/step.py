"""What the steps that measure have in common: options, and what was found, written down part by part."""

from __future__ import annotations

import argparse
import faulthandler
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

import dcp_datastates as ds
from gpu_first.output import replace_json

Options = argparse.Namespace
"""``tiny``, ``device`` (``"cuda"`` or, if tiny, ``"cpu"``), ``dir`` (the step's own folder), ``into``, ``variant``."""
Part: TypeAlias = tuple[str, Callable[[], Any]]
"""A name, and what finds out. If that raises, the error is noted, and the parts after it run."""


def main(parts: Callable[[Options], Iterator[Part]]) -> None:
    """Run the parts one after another; exit with 1 if one failed. What was found by then is in the file ``--into``."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--tiny", action="store_true", help="on the host: no figures")
    arguments.add_argument("--into", type=Path, required=True, help="what is found, as JSON")
    arguments.add_argument("--until", type=float, required=True, help="of time.monotonic()")
    arguments.add_argument("variant", nargs="?")
    options = arguments.parse_args()
    options.device = "cpu" if options.tiny else "cuda"
    options.dir = Path(tempfile.gettempdir())
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1, options.until - time.monotonic()), exit=True)
    found: dict[str, Any] = {}
    errors = 0
    for name, part in parts(options):
        try:
            found[name] = part()
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            errors += 1
        replace_json(options.into, found)
    sys.exit(1 if errors else 0)


class Saves:
    """Of ``count`` tensors of ``nbytes`` each, all read later, by a host cache that holds them."""

    def __init__(self, options: Options, count: int, nbytes: int) -> None:
        if options.tiny:
            count, nbytes = min(count, 200), min(nbytes, 4 << 20)
        self._path = options.dir / "saved"
        self._state = {
            f"{index}": torch.ones(nbytes // 4, device=options.device) for index in range(count)
        }
        self.cache = max(count * nbytes * 3 // 2, 64 << 20)
        self._writer = ds.DataStatesWriter(host_cache_size=self.cache, reads="all")

    def save(self) -> ds.results.SaveHandle:
        return ds.async_save(self._state, self._path, writer=self._writer)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = [1e6 * each for each in sorted(seconds)]
    names = {"p50 µs": 0.5, "p99 µs": 0.99, "max µs": 1.0}
    at = {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in names.items()}
    return {"count": len(ordered), **at}
