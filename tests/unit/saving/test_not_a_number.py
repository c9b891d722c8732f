"""NaN in what is saved is named once, or fails the save; anything else is no concern of this."""

import logging

import pytest
import torch
from support.state.checkpoints import CACHE
from support.tiers import sampled
from support.waiting import lines

import dcp_datastates as ds
from dcp_datastates import CheckpointManager
from dcp_datastates.errors import ConfigurationError, SaveFailedError
from dcp_datastates.saving import write

SMALL, LARGE = (7,), (200, 200)
KINDS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SAYS = "NaN"


@pytest.fixture(autouse=True)
def _not_said_yet():
    write._warn.cache_clear()


def a_model(kind, shape, defer):
    """A parameter that has become NaN. Of an optimizer, a large one is read later."""
    value = torch.nn.Parameter(torch.full(shape, float("nan"), dtype=kind))
    if defer:
        ds.track(torch.optim.SGD([value], lr=0.1))
    return {"fine": torch.ones(shape, dtype=kind), "weight": value}


CASES = [
    (kind, shape, defer) for kind in KINDS for shape in (SMALL, LARGE) for defer in (False, True)
]


@pytest.mark.parametrize(
    ("kind", "shape", "defer"), sampled(CASES, lambda case: case[0] is torch.bfloat16)
)
def test_weights_that_are_nan_are_named_once_or_fail_the_save(kind, shape, defer, tmp_path):
    state = {"model": a_model(kind, shape, defer), "step": 3}
    with lines(logging.WARNING) as said:
        for number in range(3):
            ds.async_save(state, tmp_path / f"a{number}", host_cache_size=CACHE).result(60)
    (line,) = [each for each in said if SAYS in each]
    if shape is SMALL or defer:
        assert "'model.weight'" in line
        assert "fine" not in line
    with pytest.raises(SaveFailedError, match=r"'model\.weight'"):
        ds.async_save(state, tmp_path / "b", host_cache_size=CACHE, on_nan="refuse").result(60)
    assert ds.latest(tmp_path).name == "a2"


def test_what_is_no_nan_is_saved_without_a_word(tmp_path):
    state = {
        "infinite": torch.full(SMALL, float("inf")),
        "integers": torch.zeros(SMALL, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "eight bits": torch.zeros(SMALL, dtype=torch.float8_e4m3fn),
        "scalar": torch.tensor(1.0),
        "complex": torch.full(SMALL, 1j).conj(),
        "mixed": [torch.ones(3, dtype=torch.float64), torch.ones(1, dtype=torch.float16)],
    }
    with lines(logging.WARNING) as said:
        handle = ds.async_save(
            state, tmp_path / "a", metrics={"loss": 1.5}, host_cache_size=CACHE, on_nan="refuse"
        )
        handle.result(60)
    assert said == []


def test_of_many_large_tensors_each_is_looked_at_in_its_turn(tmp_path):
    values = [torch.nn.Parameter(torch.ones(LARGE)) for _ in range(200)]
    ds.track(torch.optim.SGD(values, lr=0.1))
    values[77].data[:] = float("nan")
    with lines(logging.WARNING) as said:
        for number in range(4):
            ds.save({"values": values}, tmp_path / str(number), host_cache_size=CACHE)
    assert ["'values.77'" in each for each in said if SAYS in each] == [True]


def test_a_metric_that_is_nan_is_named_or_fails_the_save(tmp_path):
    metrics = {"loss": float("nan"), "accuracy": 0.5}
    with lines(logging.WARNING) as said:
        ds.async_save(
            {"t": torch.ones(3)}, tmp_path / "a", metrics=metrics, host_cache_size=CACHE
        ).result(60)
    (line,) = [each for each in said if SAYS in each]
    assert "'metrics.loss'" in line
    assert "accuracy" not in line
    options = {"every": 1, "on_nan": "refuse", "host_cache_size": CACHE}
    with CheckpointManager(tmp_path, **options) as checkpoints:
        handle = checkpoints.save(1, {"t": torch.ones(3)}, metrics=metrics)
        with pytest.raises(SaveFailedError, match=r"metrics\.loss"):
            handle.result(60)


def test_other_answers_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="on_nan"):
        ds.save({"t": torch.ones(3)}, tmp_path / "a", on_nan="ignore")
