"""Step 1: what the machine is: driver, memory, links. It needs no GPU, and says then that there is none."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dcp_datastates.process.memory_limit import memory_limit
from gpu_first.step import Findings, Options, free_bytes, main
from machine import describe

_SMI_FIELDS = (
    *("name", "driver_version", "memory.total", "pci.bus_id"),
    *("pcie.link.gen.current", "pcie.link.gen.max"),
    *("pcie.link.width.current", "pcie.link.width.max"),
)


def measure(options: Options, findings: Findings) -> None:
    for name, value in describe(options.dir).items():
        findings.note(name, value)
    findings.note("torch", _torch())
    smi = _nvidia_smi()
    findings.note("nvidia_smi", smi)
    with findings.part("pci"):
        findings.note("pci", _pci(smi))
    findings.note("memory", _memory())
    findings.note("free_bytes", {str(path): free_bytes(path) for path in _folders()})


def _torch() -> dict[str, Any]:
    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        return {**found, "device": None}
    properties = torch.cuda.get_device_properties(0)
    return {
        **found,
        "device": properties.name,
        "devices": torch.cuda.device_count(),
        "driver": torch._C._cuda_getDriverVersion(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _nvidia_smi() -> dict[str, str] | None:
    """Of the first GPU; None where there is no such program, or it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, check=True, timeout=10, capture_output=True, text=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return smi_fields(said.stdout)


def smi_fields(said: str) -> dict[str, str]:
    """Of the first line."""
    values = [value.strip() for value in said.splitlines()[0].split(",")]
    return dict(zip(_SMI_FIELDS, values, strict=True))


def _pci(smi: dict[str, str] | None) -> dict[str, str | None]:
    """The NUMA node of the GPU."""
    if smi is None:
        return {}
    device = Path("/sys/bus/pci/devices") / smi["pci.bus_id"].lower()[-12:]
    names = ("numa_node", "local_cpulist")
    return {name: _line(device / name) for name in names}


def _memory() -> dict[str, Any]:
    limit = memory_limit()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    huge = Path("/sys/kernel/mm/transparent_hugepage")
    return {
        "limit_bytes": limit.nbytes,
        "limit_source": limit.source,
        "locked_limit": "unlimited" if locked == resource.RLIM_INFINITY else locked,
        "huge_pages": {name: _line(huge / name) for name in ("enabled", "defrag")},
        "numa_nodes": _line(Path("/sys/devices/system/node/online")),
        "cpus": len(os.sched_getaffinity(0)),
    }


def _folders() -> list[Path]:
    return [each for each in (Path("/dev/shm"), Path("/tmp")) if each.is_dir()]


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main(measure, needs_gpu=False))
