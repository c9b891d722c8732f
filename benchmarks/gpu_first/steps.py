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


def _small(name: str, batches: str) -> Step:
    return Step(name, "small", 10, environment={"DCP_DATASTATES_CUDA_BATCH": batches})


STEPS = (
    Step("facts", "facts", 15),
    Step("copies", "copies", 25),
    Step("tests", "device_tests", 100, ("--seconds", "90")),
    Step("launches", "launches", 50),
    Step("cold_large", "cold", 25, ("--cache", "large")),
    Step("cold_small", "cold", 25, ("--cache", "small")),
    Step("cold_stock", "cold", 25, ("--cache", "stock")),
    Step("training", "training", 115),
    Step("fsdp", "fsdp", 35),
    _allocator("expandable_segments", "expandable_segments:True"),
    _allocator("malloc_async", "backend:cudaMallocAsync"),
    _small("small_batched", "1"),
    _small("small_one_by_one", "0"),
    Step("dying", "dying", 45),
)
