"""A host cache far smaller than the state, references, leaks: nothing is lost, nothing is kept."""

import gc

import pytest
import torch
from support.state.checkpoints import (
    assert_same,
    async_save,
    clone,
    load,
    load_everything,
    save,
    writer,
    zeros,
)
from support.state.states import filled, large
from support.tiers import sampled
from torch import nn

from dcp_datastates import track


def _owned(mebibytes, tensors=6, seed=0):
    parameters = nn.ParameterDict(large(mebibytes, tensors, seed))
    optimizer = torch.optim.SGD(parameters.values(), lr=0.5)
    track(optimizer)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    return dict(parameters), optimizer


@pytest.mark.parametrize("reads", sampled([60, "immediate", "blocking"], keep=[60, "blocking"]))
def test_a_state_more_than_twice_the_host_cache_is_saved_right(reads, tmp_path):
    state, optimizer = _owned(72)
    expected = clone(state)
    future = async_save(state, tmp_path, host_cache_size="32MiB", reads=reads)
    optimizer.step()
    future.result(120)
    assert_same(load(zeros(expected), tmp_path), expected)


def test_a_synchronous_save_larger_than_the_host_cache_is_right(tmp_path):
    state = large(48)
    save(state, tmp_path, host_cache_size="32MiB")
    assert_same(load(zeros(state), tmp_path), state)


def test_many_saves_in_flight_share_a_small_host_cache(tmp_path):
    ours = writer(host_cache_size="32MiB", reads=0.1)
    states = [large(16, seed=number) for number in range(5)]
    futures = [
        async_save(state, None, by=ours, checkpoint_id=tmp_path / str(number))
        for number, state in enumerate(states)
    ]
    for future in futures:
        future.result(120)
    for number, state in enumerate(states):
        assert_same(load(zeros(state), tmp_path / str(number)), state)


def test_saves_whose_window_is_shut_do_not_block_the_next_async_save(tmp_path):
    """The next ``stage()`` needs cache that older saves hold; they must not wait for a backward pass."""
    futures = []
    for number in range(3):
        state, optimizer = _owned(16, seed=number)
        state["eager"] = filled((20 << 20,), torch.uint8, number)
        expected = clone(state)
        path = tmp_path / str(number)
        future = async_save(state, path, host_cache_size="32MiB", reads=3600)
        futures.append((future, expected, path, optimizer))
    for future, expected, path, optimizer in futures:
        optimizer.step()
        future.result(120)
        assert_same(load(zeros(expected), path), expected)


def test_loads_proceed_while_saves_fill_the_host_cache(tmp_path):
    state = large(24)
    save(state, tmp_path / "old")
    held, optimizer = _owned(80)
    expected = clone(held)
    future = async_save(held, tmp_path / "new", reads=3600)
    for _ in range(3):
        assert_same(load(zeros(state), tmp_path / "old"), state)
    optimizer.step()
    future.result(120)
    assert_same(load(zeros(expected), tmp_path / "new"), expected)


def test_the_state_may_be_deleted_right_after_the_call(tmp_path):
    state, optimizer = _owned(32)
    expected = clone(state)
    future = async_save(state, tmp_path, reads=1.0)
    del state, optimizer
    gc.collect()
    trash = [torch.full((1 << 20,), 7.0) for _ in range(16)]
    future.result(60)
    assert trash
    assert_same(load_everything(tmp_path), expected)
