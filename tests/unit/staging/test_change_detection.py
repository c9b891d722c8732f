"""Writes that no gate can hold back: the right bytes, or ``SnapshotTornError`` and no commit. Never wrong."""

import threading

import torch
from support.state.checkpoints import assert_same, async_save, clone, load, raises, zeros
from support.state.loops import TrainingRun

from dcp_datastates.errors import SnapshotTornError
from dcp_datastates.staging.change_detection import Portion


def _add_to_one(run):
    run.model.output.weight.data.add_(1)


def _no_grad_copy(run):
    with torch.no_grad():
        run.model.output.weight.copy_(torch.zeros(run.width, run.width))


def test_with_nothing_deferred_any_write_is_fine(tmp_path):
    run = TrainingRun()
    run.step()
    run.forward_backward()
    expected = clone(run.state())
    future = async_save(run.state(), tmp_path, reads="blocking")
    for tensor in [*run.model.parameters(), *run.state()["optimizer"].values()]:
        tensor.data.add_(1)
    future.result(60)
    assert_same(load(zeros(expected), tmp_path), expected)


def test_the_error_names_the_write_that_tore_the_save_not_those_behind_it(tmp_path, monkeypatch):
    """The gate finds the write first and lets its optimizer pass, whose writes the save's own thread finds."""
    run = TrainingRun()
    run.step()
    run.forward_backward()
    both_check, stepped = threading.Barrier(2, timeout=60), threading.Event()
    check = Portion.check

    def in_this_order(portion):
        both_check.wait()
        if threading.current_thread() is not threading.main_thread():
            assert stepped.wait(60)
        check(portion)

    future = async_save(run.state(), tmp_path, reads=3600)
    _no_grad_copy(run)
    monkeypatch.setattr(Portion, "check", in_this_order)
    run.optimizer.step()
    stepped.set()
    with raises(SnapshotTornError, "1 deferred tensor(s)", "output.weight"):
        future.result(60)


def test_a_torn_save_names_the_way_out_and_leaves_the_old_checkpoint_and_the_next_works(tmp_path):
    run = TrainingRun()
    run.step()
    old = clone(run.state())
    async_save(run.state(), tmp_path, reads="blocking").result(60)
    run.forward_backward()
    future = async_save(run.state(), tmp_path, reads=3600)
    _add_to_one(run)
    run.optimizer.step()
    with raises(SnapshotTornError, "output.weight", 'reads="blocking"'):
        future.result(60)
    assert_same(load(zeros(old), tmp_path), old)
    expected = clone(run.state())
    future = async_save(run.state(), tmp_path, reads=3600)
    run.step()
    future.result(60)
    assert_same(load(zeros(expected), tmp_path), expected)


def test_a_tensor_resized_after_the_call_is_saved_as_it_was(tmp_path):
    tensor = torch.arange(100_000.0)
    expected = tensor.clone()
    future = async_save({"t": tensor}, tmp_path)
    tensor.resize_(10)
    tensor.zero_()
    future.result(60)
    assert_same(load({"t": torch.zeros(100_000)}, tmp_path), {"t": expected})
