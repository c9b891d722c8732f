"""What all steps have in common: their options, the refusal where there is no GPU, and what they have found so far."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import math
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_output import replace_json

__all__ = [
    "NO_GPU",
    "REFUSED",
    "Findings",
    "NeedsGpuError",
    "Options",
    "free_bytes",
    "main",
    "spread",
    "synchronize",
]

REFUSED = 77
"""The exit code of a step that finds no GPU."""

NO_GPU = "no GPU:"
"""So begins what it says."""

Options = argparse.Namespace
"""Of a step: ``device`` (``"cuda"`` or ``"cpu"``), ``tiny``, ``dir`` (a folder of its own), and what it adds."""


class NeedsGpuError(RuntimeError):
    """A part of a step cannot run on the host."""


class Findings(dict[str, Any]):
    """What a step has found. :meth:`note` also writes it all down, so that a step that is killed leaves what it has."""

    def __init__(self, into: Path | None) -> None:
        super().__init__()
        self._into = into
        self.failed: list[str] = []
        """The parts that did."""

    def note(self, name: str, value: Any) -> None:
        self[name] = value
        print(f"{name}: {value}", flush=True)
        self.save()

    def save(self) -> None:
        """Write all of it down."""
        if self._into is not None:
            replace_json(self._into, self)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part that may fail without the parts after it. Then the step fails in the end."""
        try:
            yield
        except NeedsGpuError as error:
            self.note(name, {"left_out": str(error)})
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            self.note(name, {"error": f"{type(error).__name__}: {error}"[:500]})


def _add_nothing(arguments: argparse.ArgumentParser) -> None:
    """A step that has no options of its own."""


def main(
    measure: Callable[[Options, Findings], None],
    add_options: Callable[[argparse.ArgumentParser], None] = _add_nothing,
    *,
    needs_gpu: bool = True,
) -> int:
    """The exit code: 0; 1 if a part failed; :data:`REFUSED` where ``--device`` is a GPU and there is none."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the runner asks before it kills
    options = _parsed(add_options)
    if needs_gpu and options.device == "cuda" and not torch.cuda.is_available():
        print(f"{NO_GPU} torch {torch.__version__} finds none", flush=True)
        return REFUSED
    findings = Findings(options.into)
    with tempfile.TemporaryDirectory(
        prefix="gpu-first-", dir=options.dir, ignore_cleanup_errors=True
    ) as directory:
        options.dir = Path(directory)
        measure(options, findings)
    if findings.failed:
        print(f"failed: {', '.join(findings.failed)}", flush=True)
    return 1 if findings.failed else 0


def _parsed(add_options: Callable[[argparse.ArgumentParser], None]) -> Options:
    arguments = argparse.ArgumentParser(prog=Path(sys.argv[0]).stem)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--tiny", action="store_true", help="a check of the script, no figures")
    arguments.add_argument("--dir", type=Path, help="where checkpoints go")
    arguments.add_argument("--into", type=Path, help="a file for what is found, as JSON")
    add_options(arguments)
    return arguments.parse_args()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Count, and p50, p99 and max in microseconds."""
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(1e6 * ordered[max(0, math.ceil(share * len(ordered)) - 1)], 2)

    if not ordered:
        return {"count": 0}
    return {"count": len(ordered), "p50": at(0.5), "p99": at(0.99), "max": at(1.0)}


def free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
