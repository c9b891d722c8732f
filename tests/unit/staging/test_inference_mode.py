"""Inference mode: its tensors have no version counter, so they are copied at the call."""

import itertools

import pytest
import torch
from support.state.checkpoints import writer
from support.state.wrapped import Blocks
from support.tiers import sampled
from support.waiting import await_that
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dcp_datastates
from dcp_datastates import track

SECONDS = 60.0
COUNT = 100_000


def _sharded(local):
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


# Called in inference mode. The state, and the tensors that are written to after the call.
INFERENCE = {
    "tensor": lambda: (each := torch.ones(COUNT), [each]),
    "view": lambda: ((each := torch.ones(2, COUNT))[1], [each]),
    "Parameter": lambda: (each := torch.nn.Parameter(torch.ones(COUNT)), [each]),
    "DTensor": lambda: (_sharded(each := torch.ones(COUNT)), [each]),
    "wrapper": lambda: (Blocks(each := torch.ones(COUNT), other := torch.ones(4)), [each, other]),
}


@pytest.mark.parametrize(
    ("kind", "owned", "inside"),
    sampled(
        itertools.product(INFERENCE, [False, True], [False, True]),
        keep=lambda case: case[1] != case[2],
    ),
)
def test_an_inference_tensor_is_stored_as_it_was_at_the_call(tmp_path, kind, owned, inside):
    with torch.inference_mode():
        value, written = INFERENCE[kind]()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    track(optimizer, also=written if owned else ())
    ours = writer(reads=3600 if owned else "all")
    with torch.inference_mode(inside):
        handle = dcp_datastates.async_save({"w": value}, tmp_path, writer=ours)
    with torch.inference_mode():
        for each in written:
            each.fill_(7)
    handle.result(SECONDS)
    found = dcp_datastates.load(tmp_path)["w"]
    tensors = [found] if isinstance(found, torch.Tensor) else _floats(found)
    assert tensors
    assert all(each.eq(1).all() for each in tensors)


def _floats(nested):
    """The floating-point tensors in a nested dict."""
    if isinstance(nested, dict):
        return list(itertools.chain.from_iterable(map(_floats, nested.values())))
    return [nested] if nested.is_floating_point() else []


@pytest.mark.parametrize("save", [dcp_datastates.save, dcp_datastates.async_save])
def test_a_model_that_was_made_in_inference_mode_is_saved(tmp_path, save):
    with torch.inference_mode():
        model = torch.nn.Linear(300, 300)
    for number, state in enumerate((model.state_dict(), dict(model.named_parameters()))):
        saved = save({"model": state}, tmp_path / str(number), writer=writer())
        if save is dcp_datastates.async_save:
            saved.result(SECONDS)
        found = dcp_datastates.load(tmp_path / str(number))["model"]
        assert torch.equal(found["weight"], model.weight)


def test_parameters_that_are_trained_are_still_deferred_in_inference_mode(tmp_path):
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    track(optimizer)
    expected = model.weight.detach().clone()
    with torch.inference_mode():
        state = {"state": model.state_dict(), "parameters": dict(model.named_parameters())}
        handle = dcp_datastates.async_save(state, tmp_path, writer=writer(reads=3600))
    assert not handle.captured.done()  # the window is shut: the weights are read later
    model(torch.ones(1, 300)).sum().backward()
    await_that(handle.captured.done, SECONDS)
    handle.result(SECONDS)
    found = dcp_datastates.load(tmp_path)
    assert torch.equal(found["state"]["weight"], expected)
    assert torch.equal(found["parameters"]["weight"], expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "inside"),
    sampled(
        itertools.product(
            ["tensor", "Parameter", "transposed", "DTensor"],
            [torch.float32, torch.float64],
            [False, True],
        ),
        keep=lambda case: case[2] == (case[1] == torch.float32),
    ),
)
def test_inference_tensors_are_loaded_into(tmp_path, kind, dtype, inside):
    saved = torch.randn(30, 40)
    dcp_datastates.save({"w": saved}, tmp_path, writer=writer())
    with torch.inference_mode():
        plain = torch.zeros(40, 30, dtype=dtype).t() if kind == "transposed" else None
        target = torch.zeros(30, 40, dtype=dtype) if plain is None else plain
        if kind == "Parameter":
            target = torch.nn.Parameter(target)
        if kind == "DTensor":
            target = _sharded(target)
    with torch.inference_mode(inside):
        dcp_datastates.load(tmp_path, {"w": target}, cast=True)
    found = target.to_local() if isinstance(target, DTensor) else target
    assert torch.equal(found.to(torch.float32), saved)
