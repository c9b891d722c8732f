"""The driver's calls that ``make gpu-first`` makes by itself, on the fake driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.fake_cuda import FakeCuda, installed

from dcp_datastates.io import engine
from gpu_first import launches
from gpu_first.driver import BATCH_SINCE, Driver

CACHE = 64 << 20


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with installed() as fake:
        yield fake


@contextmanager
def context(cuda: FakeCuda) -> Iterator[None]:
    """The device's context is current in this thread, as torch has it."""
    found = ctypes.c_size_t()
    assert cuda.lib.cuDevicePrimaryCtxRetain(ctypes.byref(found), 0) == 0
    assert cuda.lib.cuCtxPushCurrent_v2(found) == 0
    try:
        yield
    finally:
        assert cuda.lib.cuCtxPopCurrent_v2(ctypes.byref(found)) == 0
        assert cuda.lib.cuDevicePrimaryCtxRelease_v2(0) == 0


def test_copies_in_a_batch(cuda: FakeCuda) -> None:
    native = engine.engine(CACHE)
    cuda.await_pinned(CACHE)  # a context, and pinned memory
    source = cuda.adopt(torch.arange(1 << 16, dtype=torch.int32))
    slab = native.slab(1 << 18, 1, 1.0)
    assert slab is not None
    driver = Driver()
    assert driver.version >= BATCH_SINCE
    assert driver.find("cuMemcpyBatchAsync", BATCH_SINCE) is not None
    assert driver.find("cuNoSuchCall", BATCH_SINCE) is None
    before = cuda.count("batches")
    places = range(0, 1 << 18, 1 << 12)
    copies = [(slab.address + at, source.data_ptr() + at, 1 << 12) for at in places]
    with context(cuda):
        driver.copy_batch(copies, cuda.main_stream(0))
        with pytest.raises(OSError, match="cuMemcpyBatchAsync returned"):
            driver.copy_batch(copies, 0)
    cuda.synchronize()
    assert cuda.count("batches") == before + 1
    assert torch.equal(torch.frombuffer(slab, dtype=torch.int32), source)


def test_launches_while_the_cache_is_pinned(cuda: FakeCuda) -> None:
    found = launches.pinning(launches.Loop("cpu"), CACHE)
    assert found["count"] > 0
    assert found["fault"] is None
    assert found["pinned_bytes"] >= found["cache_bytes"] >= CACHE
