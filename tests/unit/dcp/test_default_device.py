"""Programs that set torch's default device or dtype: the package's own tensors lie on the host, in dtypes of its own.

The device ``meta`` stands in for another device than the host: its tensors have no memory there.
"""

import contextlib

import pytest
import torch
from support.state.checkpoints import CACHE, assert_same, clone, load, save, writer, zeros
from support.state.wrapped import blocks

import dcp_datastates
from dcp_datastates import CheckpointManager, RngState, track

SECONDS = 60.0


@contextlib.contextmanager
def _set(set_default, value, back):
    set_default(value)
    try:
        yield
    finally:
        set_default(back)


DEFAULTS = {
    "set_default_device": lambda: _set(torch.set_default_device, "meta", None),
    "with torch.device": lambda: torch.device("meta"),
    "set_default_dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
}


def _state():
    torch.manual_seed(0)
    return {
        "large": torch.randn(600, 600),
        "small": torch.randn(3, 3),
        "half": torch.randn(40, 40).to(torch.bfloat16),
        "complex": torch.randn(5, dtype=torch.complex64).conj(),
        "transposed": torch.randn(300, 400).t(),
        "wrapper": blocks(seed=1),
        "nested": {"numbers": [1, 2.5], "text": "x", "scalar": torch.tensor(3.0)},
    }


@pytest.mark.parametrize("default", DEFAULTS)
def test_a_state_is_saved_and_loaded(tmp_path, default):
    state, expected, plain = _state(), _state(), _state()
    del expected["wrapper"], plain["wrapper"]
    into, wide = zeros(plain), zeros(plain)
    with DEFAULTS[default]():
        dcp_datastates.async_save(state, tmp_path / "1", writer=writer()).result(SECONDS)
        dcp_datastates.save(plain, tmp_path / "2", writer=writer())
        save(plain, tmp_path / "3")
        found = dcp_datastates.load(tmp_path / "1")
        dcp_datastates.load(tmp_path / "2", into)
        load(wide, tmp_path / "3")
    del found["wrapper"]
    assert_same(found, expected)
    assert_same(into, expected)
    assert_same(wide, expected)


@pytest.mark.parametrize("default", DEFAULTS)
def test_a_training_job_saves_and_resumes(tmp_path, default):
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    track(optimizer)
    batch = torch.ones(2, 300)

    def train():
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    with DEFAULTS[default]():
        state = {"model": model, "optimizer": optimizer, "rng": RngState(), "step": 0}
        with CheckpointManager(tmp_path, every=1, host_cache_size=CACHE) as manager:
            manager.save(1, state)
            expected = clone(model.state_dict())
            train()
        with CheckpointManager(tmp_path, every=1, host_cache_size=CACHE) as manager:
            manager.restore_latest(state)
        assert dcp_datastates.verify(dcp_datastates.latest(tmp_path)) is not None
    assert_same(dict(model.state_dict()), expected)
