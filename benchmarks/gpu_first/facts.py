"""What the machine is: driver, memory, links."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial

from dcp_datastates.process.memory_limit import memory_limit
from gpu_first.output import gpu
from gpu_first.step import Options, Part, main
from machine import describe

_LINK = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
_COMMANDS = {
    "link": f"nvidia-smi --query-gpu=name,driver_version,{_LINK} --format=csv",
    "topology": "nvidia-smi topo -m",  # the GPU's NUMA node, too
    "NUMA": "lscpu | grep NUMA",
    "locked memory": "ulimit -l",
    "huge pages": "cd /sys/kernel/mm/transparent_hugepage && grep . enabled defrag",
    "room": "df -h /dev/shm /tmp",
}


def parts(options: Options) -> Iterator[Part]:
    described = describe(options.dir)
    found = {**gpu(), **described["machine"], **described["versions"], "memory": memory_limit()}
    yield "machine", lambda: "\n".join(f"{name}: {value}" for name, value in found.items())
    for name, command in _COMMANDS.items():  # a machine need not have them
        yield name, partial(subprocess.getoutput, command)


if __name__ == "__main__":
    main(parts)
