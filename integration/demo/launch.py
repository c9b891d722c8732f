"""Running a job under torchrun, hearing its events, and ending it whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from events import Event, parse

_WORKER = Path(__file__).with_name("train.py")


@dataclass(frozen=True)
class Outcome:
    """How a job ended: torchrun's exit status, and the last lines that were no events."""

    status: int
    output: str


def run_job(
    job: Literal["first", "resume"],
    *,
    ranks: int,
    root: Path,
    iterations: int,
    hear: Callable[[Event], None],
    limit_seconds: float,
) -> Outcome:
    """Run ``job`` on ``ranks`` ranks of this machine; ``hear`` gets every event as it comes.

    After ``limit_seconds`` everything that was started is killed.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"),
        *(f"--nproc-per-node={ranks}", f"--log-dir={root / 'logs'}", str(_WORKER)),
        *(f"--job={job}", f"--root={root}", f"--iterations={iterations}"),
    ]
    output: deque[str] = deque(maxlen=60)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    ) as torchrun:
        timer = threading.Timer(limit_seconds, _kill_group, (torchrun.pid,))
        timer.start()
        try:
            assert torchrun.stdout is not None
            for line in torchrun.stdout:
                event = parse(line)
                if event:
                    hear(event)
                else:
                    output.append(line)
            torchrun.wait()
        finally:
            timer.cancel()
            _kill_group(torchrun.pid)
    return Outcome(torchrun.returncode, "".join(output))


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
