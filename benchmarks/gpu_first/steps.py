"""The steps, in their order, and the time that each may take: with installing, ten minutes for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["MOST_SECONDS", "STEPS", "Step"]

MOST_SECONDS = 520
"""Of ten minutes, the others are for installing, and for ending what must be killed."""


@dataclass(frozen=True)
class Step:
    """One process, ``python -m gpu_first.<module> <arguments>``."""

    name: str
    module: str
    limit: float
    """Seconds, after which it is killed."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def _allocator(name: str, configuration: str) -> Step:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return Step(name, "allocators", 20, environment=dict.fromkeys(names, configuration))


STEPS = (
    Step("facts", "facts", 15),
    Step("copies", "copies", 35),
    Step("tests", "device_tests", 110, ("--seconds", "100")),
    Step("launches", "launches", 45),
    Step("cold_large", "cold", 30, ("--cache", "large")),
    Step("cold_small", "cold", 30, ("--cache", "small")),
    Step("cold_stock", "cold", 30, ("--cache", "stock")),
    Step("training", "training", 100),
    Step("fsdp", "fsdp", 30),
    _allocator("expandable_segments", "expandable_segments:True"),
    _allocator("malloc_async", "backend:cudaMallocAsync"),
    Step("dying", "dying", 50),
)
