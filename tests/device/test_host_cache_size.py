"""How large the host cache is for a state on a device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.devices.fake_cuda import FakeCuda, Stepper, differing, model, save

from dcp_datastates.io import engine
from dcp_datastates.process import memory_limit
from dcp_datastates.process.memory_limit import MemoryLimit

MIB = 1 << 20
STATE = 96 * MIB


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By default, caches begin at 32 MiB, and may grow to 192 MiB."""
    limit = MemoryLimit(4 * 192 * MIB, "a test")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(memory_limit, "memory_limit", lambda root=None: limit)
    monkeypatch.setattr(memory_limit, "_DEFAULT_BYTES", 32 * MIB)
    monkeypatch.setattr(engine, "_too_small", False)
    memory_limit.default_host_cache_bytes.cache_clear()
    yield
    memory_limit.default_host_cache_bytes.cache_clear()


def cache_size() -> int:
    return engine.engine(32 * MIB).host_cache_bytes


def trained(cuda: FakeCuda, mebibytes: int) -> Stepper:
    return Stepper(cuda, model(mebibytes // 8, 2048, 1024))


def test_by_default_it_grows_to_the_state(cuda: FakeCuda, tmp_path: Path) -> None:
    stepper = trained(cuda, 96)
    sizes = []
    for index in range(3):
        expected = stepper.now()
        future = save(tmp_path / f"{index}", stepper.named, host_cache_size="auto")
        stepper.step()
        future.result()
        sizes.append(cache_size())
        assert differing(tmp_path / f"{index}", expected) == []
    assert sizes == [sizes[0]] * 3, "once"
    assert STATE < sizes[0] <= STATE + 64 * MIB


def test_by_default_it_grows_to_its_share_of_the_memory_at_most(
    cuda: FakeCuda,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "dcp_datastates")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    stepper = trained(cuda, 96)
    for index in range(2):
        expected = stepper.now()
        save(tmp_path / f"{index}", stepper.named, host_cache_size="auto").result()
        assert differing(tmp_path / f"{index}", expected) == []
    assert cache_size() == 64 * MIB
    told = [
        each.getMessage() for each in caplog.records if "more than its host" in each.getMessage()
    ]
    assert len(told) == 1
    assert "96 MiB, more than its host cache of 64 MiB" in told[0]


def test_memory_that_is_not_there_fails_no_save(
    cuda: FakeCuda,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "dcp_datastates")
    monkeypatch.setattr(engine, "memory_limit", lambda: MemoryLimit(80 * MIB, "a cgroup"))
    stepper = trained(cuda, 96)
    expected = stepper.now()
    save(tmp_path / "a", stepper.named, host_cache_size="auto").result()
    assert cache_size() == 32 * MIB
    assert differing(tmp_path / "a", expected) == []
    assert "that this process may use (a cgroup)" in caplog.text


def test_a_size_that_was_asked_for_stays(
    cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dcp_datastates")
    stepper = trained(cuda, 96)
    save(tmp_path / "a", stepper.named, host_cache_size=64 * MIB).result()
    assert cache_size() == 64 * MIB
    assert "more than its host cache" in caplog.text


def test_for_a_state_on_the_host_it_does_not_grow(
    cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dcp_datastates")
    state = {"w": torch.zeros(STATE // 4)}
    save(tmp_path / "a", state, host_cache_size="auto", reads="all").result()
    assert cache_size() == 32 * MIB
    assert "more than its host cache" not in caplog.text
