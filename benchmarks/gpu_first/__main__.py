"""Run the steps, and write down what they found after each: ``make gpu-first``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from gpu_first.page import page
from gpu_first.runner import Record, run
from gpu_first.step import NO_GPU, REFUSED, free_bytes
from gpu_first.steps import STEPS
from gpu_output import replace_json

_ROOM = 16 << 30
"""For the checkpoints of any step."""
_SMOKE_FOLDERS = Path(__file__).parents[2] / "build" / "gpu-first-smoke"
"""Not where results are: these are no measurements."""
_SHOWN_LINES = 40
_SMOKE_SECONDS = 60.0
"""A step may take longer on a slow host than on a GPU."""


def main() -> int:
    options = _parsed()
    if not options.smoke and not torch.cuda.is_available():
        print(f"{NO_GPU} torch {torch.__version__} finds none; --smoke runs the steps on the host")
        return REFUSED
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    if options.smoke:
        steps = [replace(step, limit=_SMOKE_SECONDS) for step in steps]
    now = datetime.now(timezone.utc)
    document: dict[str, Any] = {
        "benchmark": "gpu_first",
        "date": now.isoformat(timespec="seconds"),
        "smoke": options.smoke,
        "torch": torch.__version__,
        "steps": [],
    }
    folder = _SMOKE_FOLDERS / str(os.getpid()) if options.smoke else options.results
    into = folder / f"gpu-first-{now:%Y-%m-%d-%H%M}.json"
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = []
    try:
        for step in steps:
            _say(f"--- {step.name}: {step.limit:g} s at most")
            if options.smoke:
                hidden = {"CUDA_VISIBLE_DEVICES": ""}
                arguments = ["--device", "cpu", "--tiny"]
                record = run(step, arguments, environment=hidden, keep=into)
            else:
                record = run(step, directory=options.dir, keep=into)
            _tell(record)
            document["steps"].append(asdict(record))
            replace_json(into, document)
            failed += [] if record.passed else [step.name]
    finally:
        into.with_suffix(".txt").write_text(page(document))
    _say(f"\n{page(document)}")
    _say(f"{'FAILED: ' + ', '.join(failed) if failed else 'all steps passed'}; {into}")
    return 1 if failed else 0


def _parsed() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(prog="gpu_first", description=__doc__)
    arguments.add_argument("--dir", type=Path, help="where checkpoints go; default: memory")
    arguments.add_argument("--only", nargs="+", choices=[step.name for step in STEPS])
    where = arguments.add_mutually_exclusive_group(required=True)
    where.add_argument("--results", type=Path, help="a folder for the JSON and the page")
    where.add_argument(
        "--smoke", action="store_true", help="no GPU: run each step on the host, at a tiny size"
    )
    options = arguments.parse_args()
    if options.dir is None:
        options.dir = _roomy()
    return options


def _roomy() -> Path:
    """Memory, if there is room, so that no disk decides."""
    memory = Path("/dev/shm")
    if memory.is_dir() and free_bytes(memory) >= _ROOM:
        return memory
    return Path(tempfile.gettempdir())


def _tell(record: Record) -> None:
    left_out = [
        f"{part} ({found['left_out']})"
        for part, found in record.found.items()
        if isinstance(found, dict) and "left_out" in found
    ]
    if record.passed:
        _say(f"    passed, {record.seconds:.1f} s")
        for part in left_out:
            _say(f"    left out: {part}")
        return
    why = "killed at its limit" if record.killed else f"exit code {record.exit_code}"
    _say(f"    FAILED, {record.seconds:.1f} s: {why}")
    for line in record.last_lines[-_SHOWN_LINES:]:
        _say(f"    | {line}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
