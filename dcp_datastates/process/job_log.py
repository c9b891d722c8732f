"""Lines of the log that all ranks would write alike come from one rank."""

from __future__ import annotations

import logging

import torch.distributed as dist


def once_per_job(level: int) -> int:
    """``level`` on the job's first rank and in a process alone; DEBUG on the other ranks."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return logging.DEBUG
    return level
