"""How much memory this process may use: the machine's memory, or less if a limit is set."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from dcp_datastates._native import MIN_HOST_CACHE_BYTES
from dcp_datastates.process.job_log import once_per_job

logger = logging.getLogger(__name__)

_DEFAULT_BYTES: Final = 4 << 30
_DEFAULT_SHARE: Final = 4
"""By default, the caches of all ranks on a machine take at most one part in this many of the memory."""

_LOCAL_RANKS: Final = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
"""Variables by which launchers tell how many ranks a machine has."""


@dataclass(frozen=True, order=True)
class MemoryLimit:
    """A limit of ``nbytes``, imposed by ``source``."""

    nbytes: int
    source: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The least limit found: physical memory, the memory limits of the process's cgroups and their parents (versions 1
    and 2), and ``RLIMIT_AS``. Swap is not counted.

    Args:
        root: the directory that contains ``proc`` and ``sys``.
    """
    return min([_physical(root), *_cgroup_limits(root), *_address_space(root)])


@functools.cache  # every call of async_save asks
def default_host_cache_bytes(root: Path = Path("/")) -> int:
    """4 GiB, or less (then logged) if the caches of this machine's ranks would take more than a quarter of
    its memory.
    """
    limit = memory_limit(root)
    ranks = _local_ranks() or 1
    nbytes = min(_DEFAULT_BYTES, max(limit.nbytes // _DEFAULT_SHARE // ranks, MIN_HOST_CACHE_BYTES))
    if nbytes < _DEFAULT_BYTES:
        logger.log(
            once_per_job(logging.INFO),
            f"host_cache_size: {nbytes >> 20} MiB by default, a quarter of {limit.nbytes >> 20} MiB "
            f"({limit.source}) shared by {ranks} rank(s) here",
        )
    return nbytes


def largest_host_cache_bytes(world: int, root: Path = Path("/")) -> int:
    """How large this rank's cache may grow by default: a quarter of the memory, shared by the ranks of this machine. If
    no launcher tells their number, all ``world`` ranks count.
    """
    return memory_limit(root).nbytes // _DEFAULT_SHARE // (_local_ranks() or world)


def _local_ranks() -> int | None:
    """None: unknown."""
    found = (os.environ.get(name, "") for name in _LOCAL_RANKS)
    return next((int(value) for value in found if value.isdigit() and int(value) > 0), None)


def _physical(root: Path) -> MemoryLimit:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return MemoryLimit(int(line.split()[1]) << 10, "this machine's memory")
    pages = os.sysconf("SC_PHYS_PAGES")
    return MemoryLimit(os.sysconf("SC_PAGE_SIZE") * pages, "this machine's memory")


def _address_space(root: Path) -> Iterator[MemoryLimit]:
    for line in _lines(root / "proc/self/limits"):
        if line.startswith("Max address space"):
            soft = line.split()[3]
            if soft.isdigit():
                yield MemoryLimit(int(soft), "RLIMIT_AS (ulimit -v)")


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2; together with version 1, it is in a separate directory
            places = [(mounts, "memory.max"), (mounts / "unified", "memory.max")]
        elif "memory" in controllers.split(","):
            places = [(mounts / "memory", "memory.limit_in_bytes")]
        else:
            continue
        # In a container, the path may be the host's, of which only the end or the root exists.
        inner = PurePosixPath(*[part for part in PurePosixPath(path).parts if part not in "/.."])
        for directory in (inner, *inner.parents):
            for mount, name in places:
                file = mount / directory / name
                for value in _lines(file):
                    if value.strip().isdigit():
                        shown = PurePosixPath("/sys/fs/cgroup", file.relative_to(mounts))
                        yield MemoryLimit(int(value), f"the cgroup's limit in {shown}")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # missing, or not readable by this process
        return []
