"""Step 9: a device assert with a full launch queue and a save in flight: how long the process takes to end.

``death.py`` is the process that dies; once without a save, for comparison. On the host an ordinary exception takes the
assert's place.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from gpu_first.death import FAILED
from gpu_first.step import Findings, Options, main

_MOST_SECONDS = 20.0


def measure(options: Options, findings: Findings) -> None:
    for name in ("nothing", "save"):
        with findings.part(name):
            found = one_death(options, name)
            findings.note(name, found)
            if "killed_after" in found:
                findings.failed.append(name)


def one_death(options: Options, name: str) -> dict[str, Any]:
    """``seconds`` from the exception to the end of the process, by the clock that all processes share."""
    command = [sys.executable, "-m", "gpu_first.death", options.device, name, str(options.dir)]
    command += ["--tiny"] if options.tiny else []
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = child.communicate(timeout=_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        said, _ = child.communicate()
        return {"killed_after": _MOST_SECONDS, "said": said.splitlines()[-20:]}
    ended = time.monotonic()
    lines = [line for line in said.splitlines() if line]
    at = [float(line.split()[-1]) for line in lines if line.startswith(FAILED)]
    if not at:
        raise RuntimeError(f"no exception before the end: {lines[-6:]}")
    return {"exit_code": child.returncode, "seconds": ended - at[0], "said": lines[-6:]}


if __name__ == "__main__":
    sys.exit(main(measure))
