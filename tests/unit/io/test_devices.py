"""Torch's view of CUDA devices, without one: which calls are made to the runtime."""

from types import SimpleNamespace

import pytest
import torch

from dcp_datastates.io import devices
from dcp_datastates.io.devices import Cuda


@pytest.fixture
def only_device_1(monkeypatch):
    """A process that uses device 1. Device 0 is its current one, where nearly every call would create a context."""

    def stream(device):
        assert device == 1, "this creates a context on device 0"
        return SimpleNamespace(record_event=lambda: "event")

    def capturing():
        raise AssertionError("this creates a context on device 0")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    monkeypatch.setattr(devices, "_KNOWS_CONTEXTS", True)
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", lambda device: device == 1, raising=False
    )


def test_no_context_is_created_by_accident(only_device_1):
    cuda = Cuda()
    assert cuda.used() == [1]
    assert [event for _, event in cuda.mark([1])] == ["event"]
    assert not cuda.capturing()


def test_where_torch_does_not_know_contexts_no_device_is_opened(only_device_1, monkeypatch):
    monkeypatch.setattr(devices, "_KNOWS_CONTEXTS", False)
    assert Cuda().used() == []


def test_a_process_without_cuda_uses_no_device():
    assert Cuda().used() == []
    assert Cuda().mark([]) == []
    assert not Cuda().capturing()
