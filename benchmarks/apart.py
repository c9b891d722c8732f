"""A measurement in a process of its own, with memory of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["measured_apart"]


def measured_apart(script: str, arguments: list[str], seconds: float) -> Any | None:
    """What ``script``, given ``arguments`` and ``--into FILE``, wrote there as JSON.

    None, and a line that says why, if it failed or took longer than ``seconds``.
    """
    with tempfile.TemporaryDirectory() as directory:
        into = Path(directory) / "result.json"
        command = [sys.executable, script, *arguments, "--into", str(into)]
        try:
            subprocess.run(command, check=True, timeout=seconds)
            return json.loads(into.read_text())
        except (subprocess.SubprocessError, OSError) as error:
            print(f"FAILED: {error}", flush=True)
            return None
