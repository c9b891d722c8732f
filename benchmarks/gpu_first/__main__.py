"""Run the steps in processes of their own, and write down what they found after each: ``make gpu-first``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from gpu_first.output import replace_json
from gpu_first.page import page
from gpu_first.steps import STEPS, Step

_HERE = Path(__file__).parents[1]
_ROOM = 16 << 30  # for the checkpoints of any step
_LAST_LINES = 400  # tests that failed say why
_SMOKE_SECONDS = 60.0  # a slow host may take longer than a GPU
_DYING_SECONDS = 10.0  # to say where it hangs, and to end; in a driver's call that hangs, it cannot


def run(step: Step, folder: Path, *, smoke: bool = False) -> dict[str, Any]:
    """What becomes of ``step``, whose files are in ``folder``. Nothing that it has started is left."""
    began, into, log = time.monotonic(), folder / "found.json", folder / "log"
    limit = max(step.limit, _SMOKE_SECONDS) if smoke else step.limit
    command = [sys.executable, "-m", step.module, *step.arguments]
    variables = {**os.environ, **step.environment, "TMPDIR": str(folder)}
    if smoke:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if step.module != "pytest":
        command += ["--into", str(into), "--until", str(began + limit), *["--tiny"] * smoke]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=_HERE, env=variables, stdout=output, stderr=output, start_new_session=True
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit + _DYING_SECONDS)
        finally:
            ended = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DYING_SECONDS)
    found = json.loads(into.read_text()) if into.exists() else {}
    return {
        "name": step.name,
        "module": step.module,
        "limit": limit,
        "seconds": ended - began,
        "exit_code": process.returncode,
        "passed": process.returncode == 0 and ended - began < limit,
        "last_lines": log.read_text(errors="replace").splitlines()[-_LAST_LINES:],
        "found": found,
    }


def main() -> int:
    arguments = argparse.ArgumentParser(prog="gpu_first", description=__doc__)
    arguments.add_argument("--results", type=Path, required=True, help="for the JSON and the page")
    arguments.add_argument("--dir", type=Path, help="where checkpoints go; default: memory")
    arguments.add_argument("--only", nargs="+", choices=[step.name for step in STEPS])
    arguments.add_argument("--smoke", action="store_true", help="on the host, at a tiny size")
    options = arguments.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        arguments.error("there is no GPU; --smoke runs the steps on the host")
    memory = Path("/dev/shm")
    if options.dir is None and memory.is_dir() and shutil.disk_usage(memory).free >= _ROOM:
        options.dir = memory
    now = datetime.now(timezone.utc)
    into = options.results / f"gpu-first-{now:%Y-%m-%d-%H%M%S}.json"
    steps: list[dict[str, Any]] = []
    document = {"date": f"{now:%F %R}", "torch": torch.__version__, "smoke": options.smoke}
    document["steps"] = steps
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for step in STEPS:
        if options.only and step.name not in options.only:
            continue
        print(f"--- {step.name}: {step.limit:g} s at most", flush=True)
        where = step.directory or options.dir
        with tempfile.TemporaryDirectory(dir=where, ignore_cleanup_errors=True) as folder:
            steps.append(run(step, Path(folder), smoke=options.smoke))
        if not steps[-1]["passed"]:
            print(*steps[-1]["last_lines"][-40:], sep="\n")
        replace_json(into, document)
        into.with_suffix(".txt").write_text(page(document))
    print(into.with_suffix(".txt").read_text())
    failed = [step["name"] for step in steps if not step["passed"]]
    print(f"{'FAILED: ' + ', '.join(failed) if failed else 'all steps passed'}; {into}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
