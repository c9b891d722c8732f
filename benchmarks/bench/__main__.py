"""``make bench``: measure all parts, and write one report as Markdown, JSON and a picture."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.failures import reckon
from bench.parts import PARTS, SIZES
from bench.report import draw, markdown
from bench.samples import summary
from machine import describe

PEERS = ("safetensors", "torch_checkpointing", "torchsnapshot", "fastsafetensors")
PEERS += ("orbax-checkpoint", "nvidia-resiliency-ext", "deepspeed")
MOST_SECONDS = {"tiny": 120, "quick": 240, "full": 1800}
"""Of a part."""


def run(part: str, sizes: str, directory: Path, extensions: str) -> list[dict[str, Any]]:
    """The part's tables; the last one says so if it did not get to its end.

    Peers build their native code in ``extensions``, a folder of this run: in the usual one, a build that was
    killed has left a lock, for which torch waits for ever.
    """
    print(f"{part} ...", flush=True)
    with tempfile.TemporaryDirectory() as results:
        into = Path(results) / "tables.json"
        command = [sys.executable, "-m", "bench.parts", part, "--sizes", sizes]
        command += ["--dir", str(directory), "--into", str(into)]
        errors = Path(results) / "errors"  # peers say much there
        with errors.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[1],
                env={**os.environ, "TORCH_EXTENSIONS_DIR": extensions},
                stderr=file,
                start_new_session=True,
            )
        try:
            code = process.wait(MOST_SECONDS[sizes])
            last = errors.read_text(errors="replace").strip().splitlines()[-1:]
            ended = f"the process ended with code {code}: {''.join(last)}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"not done after {MOST_SECONDS[sizes]} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what peers have started
            process.wait()
        tables: list[dict[str, Any]] = json.loads(into.read_text()) if into.exists() else []
    if ended:
        row = {"name": part, "own": False, "error": ended, "figures": {}, "samples": []}
        lost = {"title": f"The rest of {part}", "about": "It was not measured.", "facts": {}}
        tables.append({"key": f"{part}.lost", "columns": [], "rows": [row], **lost})
    return tables


def measure(sizes: str, directory: Path, parts: list[str]) -> dict[str, Any]:
    begun = time.monotonic()
    document = describe(directory)
    document["quick"] = sizes != "full"
    for peer in PEERS:
        try:
            document["versions"][peer] = version(peer)
        except PackageNotFoundError:
            document["versions"][peer] = "(not installed)"
    with tempfile.TemporaryDirectory() as extensions:
        found_by_part = [run(part, sizes, directory, extensions) for part in parts]
    tables = [table for found in found_by_part for table in found]
    found = {table["key"]: table for table in tables}
    needed = [found.get(key) for key in ("saves.large", "loads.large", "training")]
    if all(needed):
        saved, loaded, trained = (table or {} for table in needed)
        tables.append(summary(reckon(saved, loaded, trained["facts"]["start"])))
    document |= {"seconds": time.monotonic() - begun, "load": os.getloadavg()[0], "tables": tables}
    return document


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small states, three minutes")
    parser.add_argument("--sizes", choices=SIZES, default="full", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    sizes = "quick" if arguments.quick else arguments.sizes
    document = measure(sizes, arguments.dir.resolve(), arguments.only)
    arguments.results.mkdir(parents=True, exist_ok=True)
    report = arguments.results / f"bench-{document['date'][:10]}.md"
    report.write_text(markdown(document))
    report.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    if not draw(document, report.with_suffix(".png")):
        print("no picture: it needs matplotlib (the extra `bench`)")
    print(f"written: {report}, .json, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
