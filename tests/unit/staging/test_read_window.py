"""When deferred reads begin: with the next backward pass, or at once where no hook on a gradient can fire."""

import pytest
import torch
import torch._dynamo.compiled_autograd
from support.state.checkpoints import async_save
from support.waiting import await_that
from torch._dynamo.testing import CompileCounter

from dcp_datastates import track
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.step_gate import arm_backward

SECONDS = 60.0


def _model():
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    track(optimizer)
    return model, optimizer


def _leave_out_all_but(monkeypatch, *optimizers):
    """The gate watches these optimizers only: those of other tests may live."""
    monkeypatch.setattr(step_gate, "known_optimizers", lambda: list(optimizers))


def _backward(model):
    model(torch.ones(4, 300)).sum().backward()


def _replay(model):
    """Gradients without a backward pass of autograd's: a captured graph writes them."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def _frozen():
    parameter = torch.nn.Parameter(torch.ones(100_000), requires_grad=False)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    track(optimizer)
    # The test keeps the optimizer, and with it what it owns.
    parameter.optimizer = optimizer
    return parameter


def test_without_gradients_reads_begin_at_once(tmp_path, monkeypatch):
    value = _frozen()
    _leave_out_all_but(monkeypatch, value.optimizer)
    future = async_save({"w": value}, tmp_path, reads=3600)
    await_that(future.done, SECONDS)
    future.result()


def test_reads_begin_at_once_after_a_step_that_no_gradient_announced(tmp_path, monkeypatch):
    """The replay of a captured backward pass calls no hook."""
    model, optimizer = _model()
    _leave_out_all_but(monkeypatch, optimizer)
    first = async_save(model.state_dict(), tmp_path / "1", reads=3600)
    _replay(model)
    optimizer.step()
    first.result(SECONDS)
    second = async_save(model.state_dict(), tmp_path / "2", reads=3600)
    await_that(second.done, SECONDS)  # without a backward pass or a step
    second.result()


def test_the_window_waits_again_once_gradients_announce_steps(monkeypatch):
    model, optimizer = _model()
    _leave_out_all_but(monkeypatch, optimizer)
    answers = []
    for gradients in (_backward, _replay, _replay, _backward, _backward):
        answers.append(arm_backward())
        gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    answers.append(arm_backward())
    answers.append(arm_backward())  # nothing has happened since
    assert answers == [True, True, False, False, True, True, True]


def test_one_optimizer_with_gradients_is_enough(monkeypatch):
    model, optimizer = _model()
    other, replayed = _model()
    _leave_out_all_but(monkeypatch, optimizer, replayed)
    for _ in range(2):
        assert arm_backward()
        _replay(other)
        replayed.step()
        _backward(model)
        optimizer.step()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("option", [False, True])
def test_saves_do_not_compile_the_backward_pass_anew(tmp_path, option, whole):
    """With compiled autograd, hooks on gradients are compiled, too."""
    torch.compiler.reset()
    model, optimizer = _model()
    compiles = CompileCounter()
    compiler = torch.compile(backend=compiles, fullgraph=whole)
    counts, saved = [], []
    for number in range(5):
        with torch._dynamo.config.patch(compiled_autograd=option):
            if number > 0:
                future = async_save(model.state_dict(), tmp_path / str(number), reads=3600)
            loss = model(torch.ones(4, 300)).sum()
            with torch._dynamo.compiled_autograd._enable(compiler):
                loss.backward()
            if option and number > 0:
                await_that(future.done, SECONDS)  # before the step
        optimizer.step()
        optimizer.zero_grad()
        if number > 0:
            saved.append(future.result(SECONDS))
        counts.append(compiles.frame_count)
    assert counts[0] > 0
    # If the option does not say so, the first save meets compiled autograd unprepared: it adds hooks.
    assert counts[1:] == [counts[0] if option else counts[1]] * 4
    assert len(saved) == 4
    torch.compiler.reset()
