"""What a save takes from the training under each framework: the framework's own save, and this package's.

One rank on a CPU, the same model everywhere. For each framework two processes train, one with the framework's own
saves and one with this package's; they take turns, so that a slow moment of the disk meets both. Frameworks that are
not installed are left out. Results: a table, and a JSON file with every sample.

    python benchmarks/frameworks.py --repeats 7 --output benchmarks/results/frameworks.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from frameworks_jobs import FRAMEWORKS
from machine import describe


def compare(framework: str, scratch: Path, repeats: int) -> dict[str, list[dict[str, float]]]:
    """The samples of ``repeats`` saves of each kind, one in turn; a first one warms up and does not count."""
    processes = {
        kind: start(framework, scratch / f"{framework}-{kind}", kind) for kind in ("stock", "ours")
    }
    samples: dict[str, list[dict[str, float]]] = {kind: [] for kind in processes}
    for _ in range(repeats + 1):
        for kind, process in processes.items():
            samples[kind].append(sample(process))
    for process in processes.values():
        process.communicate()
    return {kind: found[1:] for kind, found in samples.items()}


def start(framework: str, folder: Path, kind: str) -> subprocess.Popen[str]:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    port = {"MASTER_PORT": "29511" if kind == "ours" else "29512"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if framework == "deepspeed":
        environment |= alone | port
    jobs = Path(__file__).with_name("frameworks_jobs.py")
    command = [sys.executable, "-W", "ignore", str(jobs), framework, kind, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def sample(process: subprocess.Popen[str]) -> dict[str, float]:
    """One round of a process that trains."""
    assert process.stdin is not None
    assert process.stdout is not None
    print("go", file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith("SAMPLE "):
            return dict(json.loads(line.removeprefix("SAMPLE ")))
    raise RuntimeError(f"a process that trains ended with {process.wait()}")


def summary(samples: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Medians, in ms, and how many times less ours are."""
    found = {}
    for kind, of_kind in samples.items():
        found[f"{kind}_stall"] = statistics.median(each["call"] + each["gate"] for each in of_kind)
        found[f"{kind}_commit"] = statistics.median(each["commit"] for each in of_kind)
        slower = [each["next_step"] - each["step"] for each in of_kind]
        found[f"{kind}_slower_step"] = statistics.median(slower)
    ratios = {
        f"{name}_ratio": round(found[f"stock_{name}"] / found[f"ours_{name}"], 1)
        for name in ("stall", "commit")
    }
    return {name: round(1000 * seconds, 1) for name, seconds in found.items()} | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="where checkpoints go; default: a temporary one")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    given = parser.parse_args()
    installed = [name for name in FRAMEWORKS if importlib.util.find_spec(name)]
    document = describe(given.dir or Path(tempfile.gettempdir()))
    document["versions"] |= {name: version(name) for name in installed}
    document |= {"repeats": given.repeats, "ranks": 1, "frameworks": {}}
    for name in installed:
        with tempfile.TemporaryDirectory(dir=given.dir) as scratch:
            samples = compare(name, Path(scratch), given.repeats)
        document["frameworks"][name] = {"median_ms": summary(samples), "samples": samples}
        print(f"{name:14} {summary(samples)}", flush=True)
    if given.output:
        given.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
