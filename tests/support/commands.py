"""The command line, run as its users run it: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

__all__ = ["run_cli"]


def run_cli(*arguments: Any, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """``python -m dcp_datastates`` with these arguments, on no terminal."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "dcp_datastates", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
