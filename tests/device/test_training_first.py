"""What the device path leaves to training: memory, contexts, the end of the process."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from support.devices.fake_cuda import CACHE, FakeCuda, differing, save
from support.waiting import await_that

from dcp_datastates import DataStatesWriter
from dcp_datastates.io import devices, engine
from dcp_datastates.staging import stage


def test_a_writer_opens_the_devices_that_the_process_uses_and_no_other(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    """So the cache is pinned before the first save."""
    cuda.adopt(torch.zeros(8), 1)
    DataStatesWriter(tmp_path / "a", host_cache_size=CACHE)
    native = engine.engine(CACHE)
    await_that(lambda: native.devices_prepared)
    assert native.pinned_bytes == native.host_cache_bytes
    assert cuda.contexts(1) == 1
    assert cuda.contexts(0) == 0


def test_tensors_that_are_not_contiguous_are_made_dense_some_at_a_time(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"strided{index}": cuda.adopt(torch.randn(64, 100)).t() for index in range(10)}
    state["contiguous"] = cuda.adopt(torch.randn(100))
    expected = {name: tensor.clone() for name, tensor in state.items()}
    monkeypatch.setattr(stage, "DENSE_BYTES", 3 * 64 * 100 * 4)
    made: list[int] = []  # copies that the driver had been given when each was made dense
    dense = cuda.dense

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_contiguous():
            made.append(cuda.count("copies"))
        return dense(tensor)

    monkeypatch.setattr(devices.accelerator, "dense", counted)
    save(tmp_path / "a", state).result()
    assert differing(tmp_path / "a", expected) == []
    assert len(made) == 10
    assert max(map(made.count, made)) == 3


def test_at_the_end_of_the_process_nothing_is_unpinned(cuda: FakeCuda) -> None:
    """A device that hangs would be waited for."""
    cuda.await_pinned(CACHE)
    engine._at_exit()
    gc.collect()
    assert cuda.count("cuMemHostUnregister") == 0
    cuda.await_pinned(CACHE)
    engine._shut_down()
    gc.collect()
    assert cuda.count("cuMemHostUnregister") > 0, "else it is"
