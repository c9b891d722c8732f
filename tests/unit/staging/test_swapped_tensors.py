"""Models that are moved or converted while they are saved, and afterwards.

Torch then swaps the tensors of a parameter (``swap_tensors``): always under FSDP2, elsewhere if asked to. It
refuses tensors that have weak references.
"""

import contextlib
import itertools
import weakref

import pytest
import torch
from support.jobs.ranks import ranks
from support.state.checkpoints import writer
from support.state.planners import LatePlanner
from support.tiers import sampled
from support.waiting import await_that
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import dcp_datastates
from dcp_datastates import track
from dcp_datastates.errors import SnapshotTornError

SECONDS = 20.0


def _reload(model):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


CONVERSIONS = {
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "double": torch.nn.Module.double,
    "float": torch.nn.Module.float,
    "cpu": torch.nn.Module.cpu,
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "load_state_dict": _reload,
}
KINDS = ["plain", "swapping", "DTensor"]
STATES = {
    "state_dict": torch.nn.Module.state_dict,
    "parameters": lambda model: dict(model.named_parameters()),
}


@pytest.fixture(autouse=True)
def _swapping():
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def _trained(kind):
    torch.__future__.set_swap_module_params_on_conversion(kind == "swapping")
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200)
    if kind == "DTensor":
        mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
        for name, value in list(model.named_parameters()):
            sharded = DTensor.from_local(value.detach(), mesh, [Shard(0)], run_check=False)
            model.register_parameter(name, torch.nn.Parameter(sharded))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    track(optimizer)
    return model, optimizer


def _backward(model):
    """A gradient for each parameter, by a backward pass."""
    sum(parameter.square().sum() for parameter in model.parameters()).backward()


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(state):
    return {name: _local(value.detach()).clone().view(torch.uint8) for name, value in state.items()}


def _assert_holds(path, expected):
    found = _bytes(dcp_datastates.load(path))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


CASES = list(itertools.product(CONVERSIONS, KINDS, STATES))


@pytest.mark.parametrize(
    ("conversion", "kind", "state"),
    sampled(CASES, keep=lambda case: case[0] == "double" or case[2] == "parameters"),
)
def test_a_model_that_was_saved_is_converted_and_saved_again(tmp_path, conversion, kind, state):
    model, optimizer = _trained(kind)
    ours = writer(reads=3600)
    dcp_datastates.async_save(STATES[state](model), tmp_path / "1", writer=ours).result(SECONDS)
    CONVERSIONS[conversion](model)
    if conversion == "to_empty":
        for parameter in model.parameters():
            torch.nn.init.ones_(_local(parameter.detach()))
    optimizer.zero_grad()
    expected = _bytes(STATES[state](model))
    handle = dcp_datastates.async_save(STATES[state](model), tmp_path / "2", writer=ours)
    _backward(model)  # opens the read window: the new tensors are watched
    await_that(handle.captured.done, SECONDS)
    handle.result()
    _assert_holds(tmp_path / "2", expected)


@pytest.mark.parametrize(
    ("conversion", "kind", "state"),
    sampled(CASES, keep=lambda case: case[2] == "parameters"),
)
def test_a_conversion_during_a_save_never_changes_what_is_committed(
    tmp_path, conversion, kind, state
):
    model, _optimizer = _trained(kind)
    expected = _bytes(STATES[state](model))
    ours = writer(reads=3600)
    handle = dcp_datastates.async_save(STATES[state](model), tmp_path / "1", writer=ours)
    CONVERSIONS[conversion](model)
    with torch.no_grad():
        for parameter in model.parameters():
            if conversion != "cpu":  # that moved nothing
                _local(parameter).fill_(7)
    try:
        handle.result(SECONDS)
    except SnapshotTornError:
        pass
    else:
        _assert_holds(tmp_path / "1", expected)
    # The next save works.
    now = _bytes(STATES[state](model))
    dcp_datastates.async_save(STATES[state](model), tmp_path / "2", writer=ours).result(SECONDS)
    _assert_holds(tmp_path / "2", now)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_of_a_model_that_was_converted_meanwhile_is_not_used_again(tmp_path, kind):
    """Plans are cached for states that look alike: the look at the call, and the plan later, must be of one state."""
    model, _optimizer = _trained(kind)
    ours, slow = writer(reads=3600), LatePlanner()
    before = dcp_datastates.async_save(
        {"other": torch.zeros(3)}, tmp_path / "0", writer=ours, planner=slow
    )
    first = dcp_datastates.async_save(dict(model.named_parameters()), tmp_path / "1", writer=ours)
    model.double()
    slow.may_plan.set()
    before.result(SECONDS)
    with contextlib.suppress(SnapshotTornError):
        first.result(SECONDS)
    model.float()
    expected = _bytes(dict(model.named_parameters()))
    handle = dcp_datastates.async_save(dict(model.named_parameters()), tmp_path / "2", writer=ours)
    handle.result(SECONDS)
    _assert_holds(tmp_path / "2", expected)


@ranks(1)
def test_a_model_under_fsdp_is_moved_and_converted_after_a_save(shared_dir):
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ours = writer()
    for number, convert in enumerate((torch.nn.Module.cpu, torch.nn.Module.double)):
        kind = next(model.parameters()).dtype
        model(torch.ones(4, 200, dtype=kind)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        path = shared_dir / str(number)
        dcp_datastates.async_save(state, path, writer=ours).result(SECONDS)
        convert(model)
        optimizer.zero_grad()


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
        yield from _tensors(getattr(value, "_local_tensor", None))
        yield from _tensors(value.grad if value.is_leaf else None)
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(_tensors, value.values()))


@pytest.mark.parametrize("kind", ["plain", "DTensor"])
def test_nothing_refers_weakly_to_a_tensor(tmp_path, kind):
    model, optimizer = _trained(kind)
    low = torch.zeros(100_000)
    track(optimizer, also=[low])
    state = {"model": dict(model.named_parameters()), "low": low, "small": torch.zeros(3)}
    ours = writer()
    for number in range(2):
        handle = dcp_datastates.async_save(state, tmp_path / str(number), writer=ours)
        found = list(_tensors(state))
        assert not any(map(weakref.getweakrefs, found))
        _backward(model)
        optimizer.step()
        handle.result(SECONDS)
    dcp_datastates.load(tmp_path / "1", state)
    found = [*_tensors(state), *_tensors(dict(optimizer.state))]
    assert len(found) >= 6
    assert not any(map(weakref.getweakrefs, found))
