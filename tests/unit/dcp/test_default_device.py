"""Programs that set torch's default device or dtype: the package's own tensors lie on the host, in dtypes of its own.

The device ``meta`` stands in for another device than the host: its tensors have no memory there.
"""

import contextlib
import itertools

import pytest
import torch
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, assert_same, clone, load, save, writer, zeros
from support.state.wrapped import blocks
from support.tiers import sampled
from support.waiting import await_that

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
def test_tensors_are_loaded_with_a_cast_and_into_wrappers(tmp_path, default):
    wide = {"w": torch.zeros(600, 600, dtype=torch.float64)}
    expected, wrapped = blocks(seed=1), {"v": blocks(seed=2)}
    with DEFAULTS[default]():
        state = {"w": torch.ones(600, 600, device="cpu"), "v": expected}
        dcp_datastates.async_save(state, tmp_path, writer=writer()).result(SECONDS)
        dcp_datastates.load(tmp_path, wide, only="w", cast=True)
        dcp_datastates.load(tmp_path, wrapped, only="v")
    assert wide["w"].eq(1).all()
    assert torch.equal(wrapped["v"].codes, expected.codes)
    assert torch.equal(wrapped["v"].scales, expected.scales)


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


@pytest.mark.parametrize(
    ("default", "to"),
    sampled(
        itertools.product(DEFAULTS, ["torch", "dcp", "safetensors", "hf", "datastates"]),
        keep=lambda case: case[0] == "set_default_device" or case == ("set_default_dtype", "hf"),
    ),
)
def test_a_checkpoint_is_converted(tmp_path, default, to):
    state = {"large": torch.randn(600, 600), "small": torch.randn(3)}
    dcp_datastates.save(state, tmp_path / "from", writer=writer())
    with DEFAULTS[default]():
        dcp_datastates.convert(tmp_path / "from", tmp_path / "to", to=to)
        dcp_datastates.convert(tmp_path / "to", tmp_path / "back", to="datastates")
        found = dcp_datastates.load(tmp_path / "back")
        assert dcp_datastates.diff(tmp_path / "from", tmp_path / "back").same
    assert_same(found, state)


@ranks(2)
def test_ranks_save_and_load(shared_dir):
    state = {"w": torch.randn(600, 600, generator=torch.Generator().manual_seed(0))}
    into = {"w": torch.zeros(600, 600)}
    with torch.device("meta"):
        handle = dcp_datastates.async_save(state, shared_dir, writer=writer())
        await_that(handle.captured.done, SECONDS)
        handle.result(SECONDS)
        load(into, shared_dir)
    assert_same(into, state)
