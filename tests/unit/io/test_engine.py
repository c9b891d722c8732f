"""The process's engine, and its options."""

import ctypes
import logging
import platform
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.waiting import await_that

import dcp_datastates
from dcp_datastates import configure_engine
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.io import engine as process_engine

_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}[platform.machine()]
"""The system call's number."""


@pytest.fixture(autouse=True)
def fresh():
    """No engine yet; afterwards the default options again."""
    process_engine._shut_down()
    yield
    process_engine._shut_down()
    configure_engine()


def test_the_numbers_of_threads_are_the_chosen_ones(tmp_path):
    configure_engine(copy_threads=3, flush_threads=1, restore_threads=2)
    state = {"w": torch.arange(100_000.0)}
    dcp_datastates.save(state, tmp_path / "a", no_dist=True)
    dcp_datastates.load(tmp_path / "a", no_dist=True)
    tasks = Path("/proc/self/task").iterdir()
    names = [(task / "comm").read_text().rstrip().rpartition("-")[0] for task in tasks]
    found = Counter(name for name in names if name.startswith("ds-"))
    assert found == {"ds-copy": 3, "ds-flush": 1, "ds-restore": 2, "ds-place": 1}


def test_a_host_cache_that_does_not_grow_is_no_line(caplog):
    caplog.set_level(logging.INFO)
    size = (64 << 20) + 1  # not whole blocks
    for _ in range(3):
        process_engine.engine(size)
    assert "grown" not in caplog.text
    process_engine.engine(2 * size)
    process_engine.engine(2 * size)
    assert caplog.text.count("grown") == 1


@pytest.mark.parametrize(
    ("priority", "expected"), [("normal", {0}), ("low", {2 << 13 | 7}), ("idle", {3 << 13})]
)
def test_the_threads_that_write_have_the_chosen_priority(priority, expected, tmp_path):
    configure_engine(io_priority=priority)
    dcp_datastates.save({"w": torch.arange(100_000.0)}, tmp_path / "a", no_dist=True)
    threads = [
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().startswith("ds-flush")
    ]
    get = ctypes.CDLL(None).syscall
    assert {get(_IOPRIO_GET, 1, thread) for thread in threads} == expected


def test_saves_write_no_faster_than_is_said_and_the_end_of_one_is_not_held_up(tmp_path):
    configure_engine(write_rate="64MiB/s")
    state = {"w": torch.zeros(12 << 20)}  # 48 MiB
    begun = time.monotonic()
    dcp_datastates.save(state, tmp_path / "a", no_dist=True)
    # The first segment goes at once, each other when the one before has had its time.
    assert time.monotonic() - begun >= 40 / 64
    process_engine._shut_down()
    configure_engine(write_rate="1MiB/s")
    native = process_engine.engine()
    handle = dcp_datastates.async_save(state, tmp_path / "b", no_dist=True)
    await_that(lambda: list((tmp_path / "b").rglob("*.safetensors")))  # it is written
    begun = time.monotonic()
    process_engine._shut_down()  # 40 s before it could have written all
    with pytest.raises(dcp_datastates.errors.DataStatesError):
        handle.result(60)
    assert time.monotonic() - begun < 30
    assert not native.alive


def test_an_engine_that_exists_keeps_its_options():
    configure_engine(flush_threads=2)
    process_engine.engine()
    configure_engine(flush_threads=2)
    with pytest.raises(ConfigurationError, match="before the first writer"):
        configure_engine(flush_threads=3)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("copy_threads", 0, "copy_threads=0 must be an int between 1 and 256"),
        ("flush_threads", 257, "flush_threads=257 must be an int between 1 and 256"),
        ("restore_threads", "4", "restore_threads='4' must be an int"),
        ("copy_threads", True, "copy_threads=True must be an int"),
        ("copy_rate", "fast", "copy_rate='fast' is not a size"),
        ("copy_rate", 1000, "copy_rate=1000 is below the minimum of 64MiB per second"),
        ("copy_rate", 0, "pass None for no limit"),
        ("write_rate", "1MB/s", "write_rate='1MB/s' is below the minimum of 1MiB per second"),
        ("io_priority", "high", "io_priority='high' is not an option; choose one of 'normal'"),
    ],
)
def test_an_option_that_cannot_work_is_refused(option, value, words):
    with pytest.raises(ConfigurationError, match=words):
        configure_engine(**{option: value})
