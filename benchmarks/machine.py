"""What a result was measured on: hardware and versions, never names of hosts or users."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe(directory: Path) -> dict[str, Any]:
    """Machine, versions and date; ``directory`` is where the checkpoints of the benchmark go."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "architecture": platform.machine(),
            "cpu": _cpu_model(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_gib": round(
                os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30), 1
            ),
            "kernel": platform.release(),
            "file_system": _file_system(directory),
            "disk": _disk(directory),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("dcp_datastates", "torch", "numpy")},
        },
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


def _file_system(directory: Path) -> str:
    """Type of the file system that holds ``directory``."""
    directory = directory.resolve()
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        point = Path(mount)
        if directory.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, found
    return kind


def _disk(directory: Path) -> str:
    """Kind of the block device below ``directory``, as far as the kernel tells."""
    number = directory.stat().st_dev
    if (
        device := Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    ).name.startswith("vd"):
        return "a virtual disk"
    for folder in (device, device.parent):
        rotates, model = folder / "queue" / "rotational", folder / "device" / "model"
        if rotates.exists():
            kind = "a rotating disk" if rotates.read_text().strip() == "1" else "a solid-state disk"
            return f"{kind} ({model.read_text().strip()})" if model.exists() else kind
    return "no block device"
