"""``dcp_datastates.load``: into a state, or as it was saved, with nothing but a path."""

import pytest
import torch
from support.jobs.ranks import ranks
from support.state.checkpoints import assert_same, save, zeros
from support.state.chunks import boxes, save_by_ranks
from support.state.files import data_files, flip_bit
from support.state.loops import Stateful
from support.state.metadata import rewritten
from support.state.roots import save_stock
from support.state.states import Opinion, filled
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from dcp_datastates import load
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    ForeignCheckpointError,
    IncompatibleStateError,
    UnsafeObjectError,
)
from dcp_datastates.loading import stored


def _state():
    return {
        "model": {
            "layer": {
                "0": {"weight": filled((300, 40), torch.bfloat16)},
                "10": {"weight": filled((3,), torch.int8)},
            },
            "scale": filled((), torch.float64),
            "nothing": torch.empty(0, 7),
        },
        "history": [filled((5,), torch.float32, 1), {"best": filled((2, 2), torch.float32, 2)}],
        "opinion": Opinion("kept"),
        "step": 7,
    }


@pytest.fixture
def path(tmp_path):
    save(_state(), tmp_path / "c")
    return tmp_path / "c"


# --- without a state ------------------------------------------------------------------------------------


def test_everything_comes_back_nested_as_it_was_saved(path):
    assert_same(load(path, allow_objects=True), _state())


def test_it_needs_no_process_group_and_is_quiet(path, capfd, recwarn):
    load(path, allow_objects=True)
    assert not torch.distributed.is_initialized()
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("step", lambda s: {"step": s["step"]}),
        ("model.layer", lambda s: {"model": {"layer": s["model"]["layer"]}}),
        ("model.layer.1", None),
        ("model.layer.10", lambda s: {"model": {"layer": {"10": s["model"]["layer"]["10"]}}}),
        (["step", "model.scale"], lambda s: {"step": 7, "model": {"scale": s["model"]["scale"]}}),
        ({"history.1.best"}, lambda s: {"history": [None, {"best": s["history"][1]["best"]}]}),
        ((), lambda s: {}),
    ],
)
def test_keys_choose_names_and_what_lies_under_them(keys, expected, path):
    if expected is None:
        with pytest.raises(IncompatibleStateError, match=r"model\.layer\.10"):
            load(path, only=keys)
        return
    assert_same(load(path, only=keys), expected(_state()))


def test_only_what_is_chosen_is_read(path, tmp_path):
    state = {"a": filled((3 << 20,), torch.uint8), "b": filled((3 << 20,), torch.uint8, 1)}
    save(state, tmp_path / "two")
    (file,) = data_files(tmp_path / "two")
    flip_bit(file, (4 << 20) + 10)  # in b, in a block of its own
    assert_same(load(tmp_path / "two", only="a"), {"a": state["a"]})
    with pytest.raises(CheckpointCorruptError, match="'b'"):
        load(tmp_path / "two")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("modle", "did you mean 'model'"),
        ("model.layers.0", "'model.layer.0'"),
        ("scale", "'model.scale'"),
        ("xyzzy", "it has 'model', 'history'"),
        (["step", "stop"], "no 'stop'; did you mean 'step'"),
    ],
)
def test_a_name_that_is_not_there_is_an_error_with_names_that_are_like_it(key, words, path):
    with pytest.raises(IncompatibleStateError) as caught:
        load(path, only=key)
    assert words in str(caught.value)


@pytest.mark.parametrize("keys", [7, [1], b"model"])
def test_keys_that_are_no_names_are_refused(keys, path):
    with pytest.raises(ConfigurationError, match="only="):
        load(path, only=keys)


@pytest.mark.parametrize("pairs", [1, 1 << 18])
def test_shards_of_many_ranks_are_put_together(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "_MOST_PAIRS", pairs)  # compared in one pass
    state = {"w": filled((30, 41), torch.float32), "v": filled((64,), torch.int64, 1)}
    state["u"] = filled((30, 41), torch.float32, 2)
    w, v = boxes((30, 41), ([7, 20], [11])), boxes((64,), ([1, 63],))
    parts = {"w": w, "v": v, "u": w}
    of_ranks = [{k: (state[k], part[n::3]) for k, part in parts.items()} for n in range(3)]
    save_by_ranks(tmp_path, of_ranks)
    assert_same(load(tmp_path), state)


def _forget_a_chunk(parts):
    columns, place = parts.columns, parts.place("w")
    columns["counts"][parts.document["names"].index("w")] -= 1
    for name in ("files", "begins", "lengths"):
        del columns[name][place + 1]
    first = 2 * place if parts.document["names"][0] == "w" else place
    for name in ("offsets", "sizes"):
        del columns[name][first + 2 : first + 4]


def test_a_tensor_of_which_a_part_was_never_saved_is_refused_by_name(tmp_path):
    state = {"w": filled((30, 4), torch.float32), "v": filled((6,), torch.float32, 1)}
    save_by_ranks(
        tmp_path,
        [{"w": (state["w"], boxes((30, 4), ([10], []))), "v": (state["v"], boxes((6,), ([],)))}],
    )
    rewritten(tmp_path, _forget_a_chunk)
    with pytest.raises(IncompatibleStateError, match="'w', 40 of 120 elements"):
        load(tmp_path)
    assert_same(load(tmp_path, only="v"), {"v": state["v"]})


def test_objects_that_may_run_code_are_refused_unless_they_are_left_out(path):
    state = _state()
    with pytest.raises(UnsafeObjectError, match=r"'opinion'.*Opinion.*allow_objects"):
        load(path)
    del state["opinion"]
    assert_same(load(path, exclude="opinion"), state)


def test_what_is_there_instead_of_a_checkpoint_is_said(tmp_path):
    assert issubclass(CheckpointNotFoundError, FileNotFoundError)
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        load(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists(), "a load must create nothing"
    save_stock(tmp_path / "stock")
    with pytest.raises(ForeignCheckpointError, match="FileSystemReader"):
        load(tmp_path / "stock")


# --- into a state, in one process -----------------------------------------------------------------------


def test_a_state_is_filled_in_place_and_returned(path):
    target = zeros(_state())
    target["opinion"] = target["step"] = None
    weight, history = target["model"]["layer"]["0"]["weight"], target["history"]
    assert load(path, target, allow_objects=True) is target
    assert_same(target, _state())
    assert weight is target["model"]["layer"]["0"]["weight"]
    assert history is target["history"]


def test_stateful_objects_are_given_what_was_loaded(tmp_path):
    saved = Stateful({"tensor": torch.arange(4.0), "count": 9})
    save({"it": saved, "n": 1}, tmp_path)
    found = Stateful({"tensor": torch.zeros(4), "count": 0})
    load(tmp_path, {"it": found, "n": 0})
    assert_same(found.state, saved.state)
    assert found.loaded == 1


@pytest.mark.parametrize("state", [[], [("step", 1)], torch.zeros(3)])
def test_a_state_that_is_no_dict_is_refused(state, path):
    with pytest.raises(ConfigurationError, match="dict"):
        load(path, state)


def test_an_object_may_have_been_saved_where_a_tensor_is(tmp_path):
    save({"lr": 0.1, "in": {"lr": 0.2}, "w": torch.arange(3.0)}, tmp_path)
    weight = torch.zeros(3)
    target = {"lr": torch.tensor(0.0), "in": {"lr": torch.tensor(0.0)}, "w": weight}
    load(tmp_path, target)
    assert target["lr"] == 0.1
    assert target["in"] == {"lr": 0.2}
    assert target["w"] is weight
    assert weight.tolist() == [0, 1, 2]


@ranks(1)
def test_tensors_on_the_meta_device_are_replaced_by_what_is_loaded(shared_dir):
    save({"w": torch.arange(3.0), "in": {"v": torch.arange(2.0)}}, shared_dir)
    mesh = init_device_mesh("cpu", (1,))
    for placed in (False, True):
        state = {"w": torch.empty(3, device="meta"), "in": {"v": torch.empty(2, device="meta")}}
        if placed:
            state["w"] = distribute_tensor(state["w"], mesh, [Replicate()])
        load(shared_dir, state)
        found = state["w"].to_local() if placed else state["w"]
        assert found.tolist() == [0, 1, 2], found
        assert state["in"]["v"].tolist() == [0, 1]


def test_objects_may_change_the_state_while_they_load(tmp_path):
    class Changing(Stateful):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            target["a"] = "another"
            del target["z"]

    save({"a": Stateful({"n": 0}), "m": Changing({"n": 0}), "n": 5, "z": 7}, tmp_path)
    target = {"a": Stateful({"n": 0}), "m": Changing({"n": 0}), "n": 0, "z": 0}
    load(tmp_path, target)
    assert target["a"] == "another"
    assert target["n"] == 5
    assert "z" not in target


def test_no_machinery_of_dcps_runs(tmp_path, monkeypatch):
    save({"w": torch.arange(3.0), "in": {"v": torch.arange(2.0)}}, tmp_path)
    for name in ("load", "_load_state_dict"):
        monkeypatch.setattr(state_dict_loader, name, lambda *args, **kwargs: 1 / 0)
    target = {"w": torch.zeros(3), "in": {"v": torch.zeros(2)}}
    load(tmp_path, target)
    assert target["w"].tolist() == [0, 1, 2]
