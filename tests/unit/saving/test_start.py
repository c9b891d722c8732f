"""What is interrupted in the training thread leaves nothing behind: no gate, no turn, no host memory."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.crashes.residue import Residue, assert_nothing_left
from support.state.checkpoints import CACHE, async_save, load

import dcp_datastates
from dcp_datastates.saving import start
from dcp_datastates.staging import deferred_reads, step_gate


def _stepped():
    parameter = torch.nn.Parameter(torch.ones(1 << 20))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"w": parameter.detach()}, optimizer


def _interrupt(*_):
    raise KeyboardInterrupt


gate = step_gate.gate


def _interrupt_behind_the_gate(reads):
    gate(reads)
    raise KeyboardInterrupt


PLACES = {
    "the state is staged": (deferred_reads, "portions", _interrupt),
    "the step is held back": (step_gate, "gate", _interrupt_behind_the_gate),
    "the read window is armed": (step_gate, "arm_backward", _interrupt),
    "the save is in flight": (start, "enter", _interrupt),
}


def _own(state, path):
    dcp_datastates.async_save(state, path, host_cache_size=CACHE).result(30)


def _by_dcp(state, path):
    async_save(state, path).result(30)


@pytest.mark.parametrize("call", [_own, _by_dcp])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_in_the_call_holds_no_step_and_no_later_save(
    place, call, tmp_path, monkeypatch
):
    state, optimizer = _stepped()
    for each in (_own, _by_dcp):
        each(state, tmp_path / "before")
    load({"w": torch.zeros(1 << 20)}, tmp_path / "before")
    before = Residue.now()
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES[place])
        with contextlib.suppress(KeyboardInterrupt):
            call(state, tmp_path / "interrupted")
            raise AssertionError("it was not interrupted")
    assert not step_gate._gated, "a step would wait for reads that never come"
    optimizer.step()
    call(state, tmp_path / "after")
    assert torch.equal(load({"w": torch.zeros(1 << 20)}, tmp_path / "after")["w"], state["w"])
    assert_nothing_left(before)
