"""A program that has changed since the save: what comes back, what is refused, and what an error says.

Each way of changing is one of ``docs/resume.md``.
"""

import itertools
import logging

import pytest
import torch
from support.state.checkpoints import assert_same
from support.state.loops import Stateful
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from dcp_datastates import CheckpointManager, save
from dcp_datastates.errors import IncompatibleStateError


def _program(*sizes, optimizer=torch.optim.AdamW):
    """A model of linear layers that has taken a step, and its optimizer."""
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
    return {"model": model, "optimizer": optimizer(model.parameters(), lr=0.01)}


def _step(state):
    state["model"](torch.rand(3, state["model"][0].in_features)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return state


def _weights(state):
    return {name: value.detach().clone() for name, value in state["model"].named_parameters()}


@pytest.fixture
def saved(tmp_path):
    """The state that was saved as step 7."""
    state = _step(_program(6, 5, 4))
    with CheckpointManager(tmp_path, every=7) as manager:
        manager.save(7, state)
    return state


def _restore(path, state, **options):
    with CheckpointManager(path, every=7) as manager:
        return manager.restore_latest(state, **options)


def _assert_taken(state, saved, names):
    for name, value in _weights(state).items():
        same = torch.equal(value, _weights(saved)[name]) if name in _weights(saved) else False
        assert same == (name in names), name


def test_a_new_layer_is_left_as_the_program_made_it_and_named(saved, tmp_path, caplog):
    state = _program(6, 5, 4, 3)
    with pytest.raises(IncompatibleStateError) as refused:
        _restore(tmp_path, state)
    assert refused.value.missing[:2] == ("model.2.weight", "model.2.bias")
    _assert_taken(state, saved, ())
    with caplog.at_level(logging.WARNING):
        assert _restore(tmp_path, state, missing="warn") == 7
    assert "'model.2.weight', 'model.2.bias'" in caplog.text
    _assert_taken(state, saved, _weights(saved))
    moments = state["optimizer"].state
    for new, old in zip(
        state["model"][0].parameters(), saved["model"][0].parameters(), strict=True
    ):
        assert torch.equal(moments[new]["exp_avg"], saved["optimizer"].state[old]["exp_avg"])
    assert not moments[state["model"][2].weight]
    _step(state)


def test_a_renamed_model_is_found_by_its_old_name_also_once_it_was_saved_by_its_new_one(
    saved, tmp_path
):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x):
            return self.last(self.first(x))

    rename = {"model.0.": "model.first.", "model.1.": "model.last."}
    rename |= {f"optimizer.state.{o[6:]}": f"optimizer.state.{n[6:]}" for o, n in rename.items()}
    model = Net()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
    with pytest.raises(
        IncompatibleStateError, match=r"'model\.first\.bias' \(was it 'model\.[01]\.bias'\?\)"
    ):
        _restore(tmp_path, state)
    assert _restore(tmp_path, state, rename=rename) == 7
    assert torch.equal(model.last.weight, saved["model"][1].weight)
    old, new = saved["model"][1].weight, model.last.weight
    assert torch.equal(
        state["optimizer"].state[new]["exp_avg_sq"], saved["optimizer"].state[old]["exp_avg_sq"]
    )
    with CheckpointManager(tmp_path, every=7) as manager:
        assert manager.restore_latest(state, rename=rename) == 7
        manager.save(14, state)
    assert _restore(tmp_path, state, rename=rename) == 14


def test_another_optimizer_begins_anew(saved, tmp_path):
    state = _program(6, 5, 4, optimizer=torch.optim.SGD)
    with pytest.raises(IncompatibleStateError, match="optimizer"):
        _restore(tmp_path, state)
    assert _restore(tmp_path, state, exclude="optimizer") == 7
    _assert_taken(state, saved, _weights(saved))
    assert not state["optimizer"].state
    _step(state)


def test_a_new_entry_of_the_state_keeps_its_value(saved, tmp_path):
    state = {**_program(6, 5, 4), "loss": 0.5, "ema": torch.ones(3)}
    with pytest.raises(IncompatibleStateError) as refused:
        _restore(tmp_path, state)
    assert set(refused.value.missing) == {"loss", "ema"}
    assert _restore(tmp_path, state, missing="ignore") == 7
    assert state["loss"] == 0.5
    assert state["ema"].tolist() == [1, 1, 1]


GROWTH = {
    "an object": lambda: (Stateful({}), lambda ema: ema.state),
    "a dict": lambda: ({}, lambda value: value),
}


@pytest.mark.parametrize("kind", GROWTH)
def test_a_state_that_grows_comes_back_whole_and_is_not_overwritten_by_less(kind, tmp_path):
    for run in range(3):
        value, of = GROWTH[kind]()
        state = {"w": torch.zeros(3), "value": value}
        with CheckpointManager(tmp_path, every=1) as manager:
            done = manager.restore_latest(state)
            held = of(state["value"])
            assert sorted(held) == sorted(f"step{n}" for n in range(2 * run))
            for step in range(2 * run, 2 * run + 2):
                assert done is None or step > done
                held[f"step{step}"] = {"loss": step * 0.5, "mean": torch.full((2,), float(step))}
                manager.save(step, state)
    last = of(state["value"])
    assert last["step0"]["mean"].tolist() == [0, 0]
    assert last["step5"]["loss"] == 2.5


def test_an_object_goes_back_to_exactly_what_it_was_saved_with(tmp_path):
    ema = Stateful({})
    with CheckpointManager(tmp_path, every=1) as manager:
        ema.state = {"a": torch.ones(2), "list": [torch.zeros(1)], "n": 1}
        manager.save(0, {"ema": ema})
        ema.state = {"a": torch.ones(5), "b": {"c": 3}, "list": [torch.ones(1)] * 3, "n": 2}
        live = ema.state
        manager.restore(0, {"ema": ema})
    assert ema.state["a"].tolist() == [1, 1]
    assert ema.state["n"] == 1
    assert [each.tolist() for each in ema.state["list"]] == [[0]]
    assert "c" not in ema.state.get("b", {})
    assert live["n"] == 2, "what state_dict() gave is the object's own"
    assert (len(live["list"]), live["b"]) == (3, {"c": 3})


@pytest.mark.parametrize("empty", [None, []])
def test_a_place_that_was_empty_is_filled(empty, tmp_path):
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.save(0, {"best": [torch.ones(2), {"step": 3}], "w": torch.ones(1)})
        state = {"best": empty, "w": torch.zeros(1)}
        manager.restore(0, state)
    assert state["best"][0].tolist() == [1, 1]
    assert state["best"][1] == {"step": 3}


def test_tensors_without_elements_come_back_in_dicts_and_objects(tmp_path):
    none, some = torch.empty(0, 3, dtype=torch.int16), torch.ones(2)
    saved = {"queue": none, "list": [none, some, none], "deep": {"queue": none}, "n": 1}
    ema, fresh = Stateful({}), Stateful({})
    ema.state = saved
    state = {"values": {}, "ema": fresh}
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.save(0, {"values": saved, "ema": ema})
        manager.restore(0, state)
    assert_same(state["values"], saved)
    assert_same(fresh.state, saved)


def test_what_does_not_fit_leaves_dicts_and_objects_as_they_are(tmp_path):
    ema = Stateful({})
    ema.state = {"a": torch.ones(2)}
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.save(0, {"ema": ema, "history": {"0": torch.ones(1)}, "w": torch.ones(3)})
        fresh, history, w = Stateful({}), {}, torch.zeros(2)
        with pytest.raises(IncompatibleStateError, match="'w': saved with"):
            manager.restore(0, {"ema": fresh, "history": history, "w": w})
    assert fresh.state == {}
    assert history == {}
    assert w.tolist() == [0, 0]


@pytest.mark.parametrize("flat", [False, True])
def test_settings_under_the_names_of_torch_are_refused_and_may_be_left_out(tmp_path, flat):
    old, state = _step(_program(6, 5)), _program(6, 5)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    names = get_state_dict(old["model"], old["optimizer"], options=options)
    save(dict(zip(("model", "optimizer"), names, strict=True)), tmp_path / "step-7")
    with pytest.raises(IncompatibleStateError, match=r"exclude='optimizer\.param_groups' keeps"):
        _restore(tmp_path, state)
    assert not state["optimizer"].state
    assert _restore(tmp_path, state, exclude="optimizer.param_groups") == 7
    assert_same(state["optimizer"].state_dict(), old["optimizer"].state_dict())
