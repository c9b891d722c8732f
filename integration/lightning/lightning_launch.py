"""Starts the training jobs of ``lightning_jobs.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.jobs.processes import Ended, run_ranks


def job(
    function: str,
    world: int,
    tmp_path: Path,
    environment: dict[str, str] | None = None,
    module: str = "lightning_jobs",
    seconds: float = 60.0,
    **arguments: Any,
) -> list[Ended]:
    environments = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "test",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            **(environment or {}),
        }
        for rank in range(world)
    ]
    return run_ranks(
        f"{module}:{function}",
        world,
        tmp_path / "scratch",
        environments=environments,
        seconds=seconds,
        **arguments,
    )


def from_step(losses: dict[int, str], first: int) -> dict[int, str]:
    return {number: loss for number, loss in losses.items() if number >= first}
