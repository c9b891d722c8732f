"""Streamed saves and restores of memory that devices have, on the fake driver."""

from __future__ import annotations

import pytest
import torch
from support.devices.fake_cuda import FakeCuda
from support.state.objects import Objects
from support.tiers import sampled

from dcp_datastates import _native
from dcp_datastates.io.engine import engine
from dcp_datastates.io.streams import Upload, fetch

SEGMENT = _native.SEGMENT_BYTES


@pytest.mark.parametrize("seed", sampled(range(6), keep=[0]))
def test_what_is_sent_from_devices_comes_back_to_them(cuda: FakeCuda, seed: int) -> None:
    cuda.configure(seed=seed, max_delay_us=2000)
    native = engine(_native.MIN_HOST_CACHE_BYTES)
    native.open_device(0)
    host = [
        torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (5 * SEGMENT + 4, 3 * SEGMENT)
    ]
    tensors = [cuda.adopt(each.clone()) for each in host]
    targets = [cuda.adopt(torch.zeros_like(each)) for each in host]

    def content(tensor: torch.Tensor) -> _native.Transfer:
        made = _native.Transfer()
        made.add(0, tensor.nbytes, tensor.data_ptr(), 1, 0)
        return made

    names = ["s3://a", "s3://b"]
    files = [
        _native.SaveFile(name, tensor.nbytes, content(tensor))
        for name, tensor in zip(names, tensors, strict=True)
    ]
    fence = native.record_event(0, cuda.stream(0))
    objects = Objects()
    save = native.save_streamed(files, 0, _native.Window(0), tensors, [fence])
    upload = Upload(save, names, objects.put_stream)
    assert save.wait(60)
    assert save.fault is None
    upload.join()

    plan = _native.RestorePlan()
    for name, target in zip(names, targets, strict=True):
        plan.add_file(name, len(objects.stored[name]), target.nbytes, content(target))
    restore = native.restore_streamed(plan, targets, [native.record_event(0, cuda.stream(0))])
    fetch(restore, objects.read_range)
    assert restore.wait(60)
    assert restore.fault is None
    for tensor, target in zip(host, targets, strict=True):
        assert torch.equal(cuda.memory(target), tensor)


def test_what_is_compared_and_not_written_is_summed_from_the_device(cuda: FakeCuda) -> None:
    cuda.configure(seed=3, max_delay_us=2000)
    native = engine(_native.MIN_HOST_CACHE_BYTES)
    native.open_device(0)
    host = torch.randint(0, 256, (5 * SEGMENT + 4,), dtype=torch.uint8)
    tensor = cuda.adopt(host.clone())
    content = _native.Transfer()
    content.add(0, tensor.nbytes, tensor.data_ptr(), 1, 0)
    file = _native.SaveFile(None, tensor.nbytes, content)
    fence = native.record_event(0, cuda.stream(0))
    save = native.save([file], [], 0, _native.Window(0), tensor, [fence])
    assert save.wait(60)
    assert save.fault is None
    blocks = host.numpy().tobytes()
    block = _native.BLOCK_BYTES
    sums = [_native.crc32c(blocks[at : at + block]) for at in range(0, len(blocks), block)]
    assert save.checksums(0) == b"".join(each.to_bytes(4, "little") for each in sums)
    assert save.bytes_written == 0
