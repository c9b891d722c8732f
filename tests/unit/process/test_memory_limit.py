"""How much memory the process may use, read from made-up files; what the host cache makes of it."""

import logging

import pytest
from support.state.checkpoints import raises

from dcp_datastates import DataStatesWriter
from dcp_datastates.config import parse_host_cache_size
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.io import engine
from dcp_datastates.process.memory_limit import (
    MemoryLimit,
    default_host_cache_bytes,
    largest_host_cache_bytes,
    memory_limit,
)

GIB = 1 << 30


def _machine(root, *, gibibytes=64, cgroup="", **files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:       {gibibytes << 20} kB\nMemFree: 5 kB\n")
    (root / "proc/self/limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max address space         unlimited            unlimited            bytes     \n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    for path, content in files.items():
        _write(root, path, content)
    return root


def _write(root, path, content):
    file = root / "sys/fs/cgroup" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{content}\n")


def test_a_machine_without_limits_has_its_memory(tmp_path):
    root = _machine(tmp_path, cgroup="0::/user.slice\n")
    _write(root, "user.slice/memory.max", "max")
    assert memory_limit(root) == MemoryLimit(64 * GIB, "this machine's memory")
    assert default_host_cache_bytes(root) == 4 * GIB


V1 = "7:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n"
LIMITS = {
    "its own": ("0::/job/step\n", "job/step/memory.max", 8 * GIB),
    "one above": ("0::/job/step/task\n", "job/memory.max", 6 * GIB),
    "version 1": (V1, "memory/docker/abc/memory.limit_in_bytes", 2 * GIB),
    "version 1, of which only the container's root is seen": (
        V1,
        "memory/memory.limit_in_bytes",
        2 * GIB,
    ),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_the_limit_of_a_cgroup_counts_and_is_named(kind, tmp_path):
    cgroup, file, nbytes = LIMITS[kind]
    root = _machine(tmp_path, cgroup=cgroup)
    _write(root, "job/step/memory.max", 8 * GIB)
    _write(root, "job/memory.max", "max")
    _write(root, "cpu/docker/abc/memory.limit_in_bytes", 1)
    _write(root, "memory/memory.limit_in_bytes", 9223372036854771712)  # none, in version 1
    _write(root, file, nbytes)
    limit = memory_limit(root)
    assert limit.nbytes == nbytes
    assert f"/sys/fs/cgroup/{file}" in limit.source


def test_a_limit_of_the_address_space_counts(tmp_path):
    root = _machine(tmp_path)
    (root / "proc/self/limits").write_text(
        "Max address space         3221225472           unlimited            bytes     \n"
    )
    assert memory_limit(root) == MemoryLimit(3 * GIB, "RLIMIT_AS (ulimit -v)")


def test_nothing_that_can_be_read_leaves_the_machines_memory(tmp_path):
    assert memory_limit(tmp_path).nbytes > 0


def test_the_default_is_a_quarter_of_less_memory_and_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    caplog.set_level(logging.INFO, "dcp_datastates")
    root = _machine(tmp_path, gibibytes=8)
    assert default_host_cache_bytes(root) == 2 * GIB
    assert "2048 MiB" in caplog.text
    assert "this machine's memory" in caplog.text


def test_the_ranks_of_a_machine_share_the_quarter(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert default_host_cache_bytes(_machine(tmp_path, gibibytes=16)) == GIB // 2


@pytest.mark.parametrize(
    ("variables", "largest"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 16 * GIB),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 32 * GIB),
        ({"LOCAL_WORLD_SIZE": "", "SLURM_NTASKS_PER_NODE": "2"}, 64 * GIB),
        ({"SLURM_NTASKS_PER_NODE": "8(x2)"}, 8 * GIB),  # not understood
        ({}, 8 * GIB),  # all ranks may be here
    ],
)
def test_for_devices_the_ranks_of_a_machine_share_a_quarter_of_any_size(
    tmp_path, monkeypatch, variables, largest
):
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert largest_host_cache_bytes(16, _machine(tmp_path, gibibytes=512)) == largest


def test_the_default_is_never_less_than_the_engine_needs(tmp_path):
    root = _machine(tmp_path, cgroup="0::/\n")
    _write(root, "memory.max", 64 << 20)
    assert default_host_cache_bytes(root) == 32 << 20


def test_auto_is_a_size():
    assert 32 << 20 <= parse_host_cache_size("auto") <= 4 * GIB


def test_a_size_beyond_the_limit_is_refused_by_name(tmp_path, monkeypatch):
    root = _machine(tmp_path / "root", cgroup="0::/\n")
    _write(root, "memory.max", 1 << 40)
    limit = MemoryLimit(memory_limit(root).nbytes, memory_limit(root).source)
    monkeypatch.setattr(engine, "memory_limit", lambda: limit)
    with raises(ConfigurationError, f"{100 * GIB}", f"{64 * GIB}", "this machine's memory"):
        DataStatesWriter(tmp_path / "c", host_cache_size="100GiB")
