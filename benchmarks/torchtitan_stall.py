"""What a checkpoint at every step takes from a torchtitan job: its own two asynchronous modes, and this package's.

The debug Llama on two CPU ranks (FSDP2), with the launcher of ``integration/torchtitan``. It needs the extra
``torchtitan``.
Results: a table, and a JSON file with every step of every rank.

    python benchmarks/torchtitan_stall.py --steps 12
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import describe

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "torchtitan"))

from jobs import Launcher, Mesh, Trial

MESH = Mesh(fsdp=2)
TOKENS = 128
WARM_UP = 3
"""Steps that are not counted: the first saves of a job learn its structure."""

CONTENDERS: dict[str, dict[str, Any]] = {
    "no checkpoints": {"mode": "disabled", "stock": True, "interval": 1000000},
    "torchtitan, disabled (synchronous)": {"mode": "disabled", "stock": True},
    "torchtitan, async": {"mode": "async", "stock": True},
    "torchtitan, async_with_pinned_mem": {"mode": "async_with_pinned_mem", "stock": True},
    "dcp_datastates, async": {"mode": "async"},
}


def measure(launcher: Launcher, folder: Path, steps: int, contender: dict[str, Any]) -> Any:
    """Every rank's steps, or the end of a log if the job failed."""
    folder.mkdir()
    trial = Trial(
        folder,
        MESH,
        steps,
        contender["mode"],
        contender.get("stock", False),
        options={"host_cache_size": "1GiB"},
        tokens=TOKENS,
        interval=contender.get("interval", 1),
        hook="hooks:time_saves",
        hook_options={"folder": str(folder)},
    )
    ended = launcher.run(trial, seconds=400)
    if any(ended.codes):
        return {"codes": ended.codes, "log": ended.logs[0].strip().splitlines()[-3:]}
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(trial.mesh.ranks)]


def summary(ranks: list[list[dict[str, float]]]) -> dict[str, float]:
    """Medians over the steps, in ms, of the slower rank; the last step is another kind of save."""
    counted = [[rank[number] for rank in ranks] for number in range(WARM_UP, len(ranks[0]) - 1)]

    def median(of: Any) -> float:
        return round(1000 * statistics.median(max(map(of, step)) for step in counted), 1)

    return {
        "stall": median(lambda one: one["save"] + one["staging"] + one["gate"]),
        "save": median(lambda one: one["save"]),
        "previous": median(lambda one: one["previous"]),
        "staging_and_gate": median(lambda one: one["staging"] + one["gate"]),
        "step": median(lambda one: one["step"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints go; default: a temporary one"
    )
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        about = describe(Path(scratch))
        about["versions"]["torchtitan"] = version("torchtitan")
        launcher = Launcher(Path(scratch))
        try:
            for name, contender in CONTENDERS.items():
                folder = Path(scratch, name.replace(" ", "-"))
                found = measure(launcher, folder, given.steps, contender)
                rows[name] = {"ranks": found}
                if isinstance(found, list):
                    rows[name] |= {"median_ms": summary(found)}
                print(f"{name:42} {rows[name].get('median_ms', found)}", flush=True)
        finally:
            launcher.close()
    if given.output:
        document = {**about, "steps": given.steps, "ranks": MESH.ranks, "rows": rows}
        given.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
