"""Starts jobs of several ranks: each rank is a process that runs one of the functions in ``deepspeed_worker.py``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 240


def run(function: str, root: Path, world: int = 2) -> list[Any]:
    """Run a job to its end; returns each rank's result."""
    with started(function, root, world) as ranks:
        codes = [rank.wait(SECONDS) for rank in ranks]
    assert codes == [0] * world, f"{function} ended with {codes}\n{_logs(function, root, world)}"
    return [json.loads(_file(function, root, rank, "json").read_text()) for rank in range(world)]


@contextlib.contextmanager
def started(
    function: str, root: Path, world: int = 2, environment: Mapping[str, str] | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of a job; ``environment`` is for rank 0 only. All are killed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as files:
        try:
            for rank in range(world):
                log = files.enter_context(_file(function, root, rank, "log").open("wb"))
                mine = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "DS_ACCELERATOR": "cpu",
                    "DS_BUILD_OPS": "0",
                    "OMP_NUM_THREADS": "1",
                    **(environment or {} if rank == 0 else {}),
                }
                result = _file(function, root, rank, "json")
                command = [sys.executable, "deepspeed_worker.py", function, str(root), str(result)]
                ranks.append(subprocess.Popen(command, cwd=HERE, env=mine, stdout=log, stderr=log))
            yield ranks
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _file(function: str, root: Path, rank: int, kind: str) -> Path:
    return root / f"{function}-{rank}.{kind}"


def _logs(function: str, root: Path, world: int) -> str:
    logs = [_file(function, root, rank, "log").read_text()[-4000:] for rank in range(world)]
    return "\n".join(f"--- rank {rank}\n{log}" for rank, log in enumerate(logs))
