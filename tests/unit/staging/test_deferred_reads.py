"""What is committed is what the tensors held at the call, whatever training does right after it."""

import itertools

import pytest
import torch
from support.state.checkpoints import assert_same, async_save, clone, load, writer, zeros
from support.state.loops import OPTIMIZERS, TrainingRun, in_backward
from support.tiers import sampled, tries

from dcp_datastates import track

windows = pytest.mark.parametrize("reads", [60, "immediate"])


def _check(path, expected):
    assert_same(load(zeros(expected), path), expected)


@pytest.mark.parametrize(
    ("optimizer", "reads"),
    sampled(
        itertools.product(OPTIMIZERS, [60, "immediate", "blocking"]),
        keep=lambda case: case[0] == "adamw foreach" or case[1] == 60,
    ),
)
def test_a_step_right_after_the_call_is_not_seen(optimizer, reads, tmp_path):
    run = TrainingRun(optimizer)
    run.step()
    run.forward_backward()
    expected = clone(run.state())
    future = async_save(run.state(), tmp_path, reads=reads)
    run.optimizer.step()
    after = clone(run.state())
    future.result(60)
    _check(tmp_path, expected)
    assert any(
        not torch.equal(after["model"][name], tensor) for name, tensor in expected["model"].items()
    ), "the step changed nothing, so this test showed nothing"


def test_deferring_all_is_right_when_only_optimizers_change_tensors(tmp_path):
    run = TrainingRun()
    run.model.eval()
    run.step()
    frozen = torch.randn(100_000)
    state = {**run.state(), "frozen": frozen}
    state["model"].pop("calls")
    expected = clone(state)
    future = async_save(state, tmp_path, reads="all")
    run.step()
    future.result(60)
    _check(tmp_path, expected)


@windows
@pytest.mark.parametrize("optimizer", ["unknown", "tracked", "made after the call"])
def test_the_first_save_of_an_optimizer_is_right(optimizer, reads, tmp_path):
    run = TrainingRun()
    if optimizer == "tracked":
        track(run.optimizer)
    elif optimizer == "made after the call":
        run.step()
    run.forward_backward()
    expected = clone(run.state())
    future = async_save(run.state(), tmp_path, reads=reads)
    if optimizer == "made after the call":
        torch.optim.SGD(run.model.parameters(), lr=1.0).step()
    else:
        run.optimizer.step()
    future.result(60)
    _check(tmp_path, expected)


@windows
def test_several_optimizers_each_step_by_themselves(reads, tmp_path):
    runs = [
        TrainingRun(name, seed=seed) for seed, name in enumerate(("adamw foreach", "sgd momentum"))
    ]
    for run in runs:
        run.step()
        run.forward_backward()
    states = {str(number): run.state() for number, run in enumerate(runs)}
    expected = clone(states)
    future = async_save(states, tmp_path, reads=reads)
    for run in reversed(runs):
        run.optimizer.step()
    future.result(60)
    _check(tmp_path, expected)


@windows
def test_a_parameter_of_two_optimizers_is_held_back_from_both(reads, tmp_path):
    for first in (0, 1):
        parameter = torch.nn.Parameter(torch.randn(500_000))
        optimizers = [torch.optim.SGD([parameter], lr=1.0) for _ in range(2)]
        parameter.grad = torch.ones_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
        expected = clone({"p": parameter})
        path = tmp_path / str(first)
        future = async_save({"p": parameter}, path, reads=reads)
        optimizers[first].step()
        future.result(60)
        _check(path, expected)


@windows
def test_optimizers_that_step_inside_backward(reads, tmp_path):
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(6)))
    optimizers = in_backward(model)

    def state():
        moments = {
            f"{n}.{key}": value
            for n, optimizer in enumerate(optimizers)
            for values in optimizer.state.values()
            for key, value in values.items()
        }
        return {"model": model.state_dict(), "moments": moments}

    model(torch.randn(4, 200)).square().sum().backward()
    ours = writer(reads=reads)
    saved = []
    for number in range(5):
        expected = clone(state())
        saved.append(
            (async_save(state(), None, by=ours, checkpoint_id=tmp_path / str(number)), expected)
        )
        model(torch.randn(4, 200)).square().sum().backward()
    for number, (future, expected) in enumerate(saved):
        future.result(60)
        _check(tmp_path / str(number), expected)


def test_gradient_accumulation_keeps_the_window_and_the_bytes(tmp_path):
    run = TrainingRun()
    run.step()
    expected = clone(run.state())
    future = async_save(
        {"optimizer": run.state()["optimizer"], "model": run.state()["model"]}, tmp_path
    )
    for _ in range(4):
        run.forward_backward()
    run.optimizer.step()
    future.result(60)
    _check(tmp_path, expected)


OPENS = {
    "backward": lambda run, ours: run.forward_backward(),
    "the deadline": lambda run, ours: None,
    "a wait for the writer": lambda run, ours: ours.wait(),
    "a wait for the outcome": lambda run, ours: ours.committed.result(30),
    "the gate": lambda run, ours: run.optimizer.step(),
}


@pytest.mark.parametrize("what", OPENS)
def test_what_opens_the_reads(what, tmp_path):
    run = TrainingRun()
    run.step()
    ours = writer(tmp_path, reads=0.2 if what == "the deadline" else 3600)
    future = async_save(run.state(), tmp_path, by=ours)
    assert what == "the deadline" or not ours.captured.done(), "reads were to wait"
    OPENS[what](run, ours)
    ours.captured.result(30)
    future.result(30)


def test_a_step_of_an_optimizer_that_owns_nothing_saved_does_not_wait(tmp_path):
    run, other = TrainingRun(), TrainingRun(seed=1)
    run.step()
    other.step()
    ours = writer(tmp_path, reads=3600)
    future = async_save(run.state(), tmp_path, by=ours)
    other.optimizer.step()
    assert not ours.captured.done(), (
        "another optimizer's step waited for reads that do not concern it"
    )
    run.step()
    future.result(60)


@pytest.mark.parametrize("iterations", tries(24, 400))
def test_hundreds_of_iterations_of_maximal_overlap(iterations, tmp_path):
    run = TrainingRun(width=160)
    run.step()
    ours = writer(reads=60)
    in_flight = []
    for number in range(iterations):
        expected = clone(run.state()) if number % 7 == 0 or number > iterations - 4 else None
        path = tmp_path / str(number)
        in_flight.append(
            (async_save(run.state(), None, by=ours, checkpoint_id=path), expected, path)
        )
        run.step()
        while len(in_flight) > 3 or (number == iterations - 1 and in_flight):
            future, wanted, where = in_flight.pop(0)
            future.result(60)
            if wanted is not None:
                _check(where, wanted)
