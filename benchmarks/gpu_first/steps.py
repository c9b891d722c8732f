"""The steps, in their order, and the time that each may take: with installing, ten minutes for all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MOST_SECONDS = 520  # of ten minutes: one must install, and end what must be killed

_ROOT = Path(__file__).parents[2]
_DEVICE = _ROOT / "tests" / "device"
_PYTEST = (  # as `make gpu-test` runs it
    *("-v", "-rs", "--tb=short", "-c", os.devnull, "--rootdir", str(_ROOT / "tests")),
    *("--import-mode=importlib", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"),
    *("--durations=8", str(_DEVICE / "test_host_or_gpu.py")),
)


@dataclass(frozen=True)
class Step:
    """One process, ``python -m <module> <arguments>``."""

    name: str
    limit: float  # seconds, after which it is killed
    module: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None  # for its checkpoints, if not that of all steps


def _allocator(name: str, configuration: str) -> Step:
    both = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), configuration)
    return Step(name, 15, "pytest", (*_PYTEST, "-k", "allocates"), both)


STEPS = (
    Step("facts", 15, "gpu_first.facts"),
    Step("copies", 20, "gpu_first.copies"),
    Step("tests", 150, "pytest", (*_PYTEST, str(_DEVICE / "test_gpu.py"))),
    Step("launches", 45, "gpu_first.launches"),
    *(
        Step(name, 25, "gpu_first.saves", (name,))
        for name in ("none", "default", "large", "small", "immediate", "stock")
    ),
    Step("large_disk", 25, "gpu_first.saves", ("large",), directory=_ROOT / "build"),
    Step("none_again", 25, "gpu_first.saves", ("none",)),  # how far the machine has drifted
    Step("many", 15, "gpu_first.saves", ("many",)),
    _allocator("expandable_segments", "expandable_segments:True"),
    _allocator("malloc_async", "backend:cudaMallocAsync"),
)
