"""What a framework saves and loads: models, optimizers, the files of each rank; and saves that it does not wait for."""

import threading
import time

import pytest
import torch
from support.crashes.failing import armed

import dcp_datastates as ds
from dcp_datastates.checkpoints.retention import Deletions
from dcp_datastates.manager.frameworks import (
    BackgroundSaves,
    files_from,
    load_parts,
    pop_options,
    state_of,
    with_files,
)


def program(*names, seed=0):
    """A model whose layers have these names, and its optimizer, after a step."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in names})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(layer(torch.rand(2, 3)).square().sum() for layer in model.values()).backward()
    optimizer.step()
    return model, optimizer


def moments(optimizer):
    return [each["exp_avg"] for each in optimizer.state.values()]


@pytest.mark.parametrize("name", ["one", "renamed"])
def test_models_and_optimizers_come_back_in_separate_calls(name, tmp_path):
    model, optimizer = program("one", "two")
    state = state_of({"model": model, "optimizer": optimizer})
    assert state["model"]["one.weight"].data_ptr() == model["one"].weight.data_ptr(), "no copy"
    ds.save(with_files(state, {"a.json": b"{}"}), tmp_path / "x")
    other, other_optimizer = program(name, "two", seed=1)
    parts = {"model": other, "optimizer": other_optimizer}
    options = {"rename": {"model.one.": f"model.{name}."}}
    load_parts(tmp_path / "x", {"model": other}, ["model"], **options)
    assert torch.equal(other[name].weight, model["one"].weight)
    assert not torch.equal(moments(other_optimizer)[0], moments(optimizer)[0])
    load_parts(tmp_path / "x", parts, ["optimizer"], **options)
    for mine, theirs in zip(moments(other_optimizer), moments(optimizer), strict=True):
        assert torch.equal(mine, theirs)
    assert files_from(tmp_path / "x") == {"a.json": b"{}"}


def test_the_state_of_an_optimizer_may_be_asked_for_alone():
    model, optimizer = program("one")
    parts = {"model": model, "optimizer": optimizer}
    assert state_of(parts, ["optimizer"]).keys() == {"optimizer"}
    assert "one.weight" in state_of(parts, ["optimizer"])["optimizer"]["state"]


def test_what_is_not_stored_is_an_error_unless_it_may_be_missing(tmp_path):
    model, optimizer = program("one")
    ds.save(state_of({"model": model}), tmp_path / "x")
    parts = {"model": model, "optimizer": optimizer, "empty": torch.nn.Identity()}
    before = [each.clone() for each in moments(optimizer)]
    with pytest.raises(ds.errors.IncompatibleStateError, match="optimizer"):
        load_parts(tmp_path / "x", parts, ["optimizer"])
    load_parts(tmp_path / "x", parts, ["optimizer", "empty"], missing="warn")
    assert all(map(torch.equal, moments(optimizer), before))
    load_parts(tmp_path / "x", parts, ["model", "empty"])


def test_a_renamed_optimizer_is_found_where_things_may_be_missing(tmp_path):
    model, optimizer = program("one")
    ds.save(state_of({"model": model, "old": optimizer}), tmp_path / "x")
    other, fresh = program("one", seed=1)
    parts = {"model": other, "optimizer": fresh}
    options = {"rename": {"old.": "optimizer."}, "missing": "warn"}
    load_parts(tmp_path / "x", parts, ["optimizer"], **options)
    assert all(map(torch.equal, moments(fresh), moments(optimizer)))


class Vocabulary:
    """More than safe types: unpickling it calls this class."""

    def __init__(self, **words):
        self.words = words


class Tokens(torch.nn.Linear):
    def __init__(self, words):
        super().__init__(2, 2)
        self.words = words

    def get_extra_state(self):
        return self.words

    def set_extra_state(self, state):
        self.words = state


def test_objects_that_may_run_code_are_an_option_of_a_frameworks_class(tmp_path):
    ds.save(state_of({"model": Tokens(Vocabulary(a=1))}), tmp_path / "x")
    fresh = Tokens(Vocabulary())
    with pytest.raises(ds.errors.UnsafeObjectError, match="Vocabulary"):
        load_parts(tmp_path / "x", {"model": fresh}, ["model"])
    assert fresh.words.words == {}
    _, options = pop_options({"allow_objects": True})
    load_parts(tmp_path / "x", {"model": fresh}, ["model"], **options)
    assert fresh.words.words == {"a": 1}
    with pytest.raises(ds.errors.ConfigurationError, match="allow_objects"):
        pop_options({"allow_objects": "yes"})


STATE = {"a": torch.arange(8)}
REFUSED = {"a": torch.eye(2).to_sparse()}


def test_a_wait_includes_what_the_commit_thread_is_about_to_delete(tmp_path, monkeypatch):
    """That thread has taken the deletion, and is held up before it passes it on."""
    taken, old = threading.Event(), tmp_path / "old"
    real = Deletions.request

    def late(deletions, delete):
        if threading.current_thread().name == "dcp_datastates-commit":
            taken.set()
            time.sleep(0.3)
        real(deletions, delete)

    monkeypatch.setattr(Deletions, "request", late)
    saves = BackgroundSaves({})
    saves.start(STATE, old)
    saves.wait()
    with armed("publish.link.before@1=sleep:0.2"):
        saves.start(STATE, tmp_path / "new")
        saves.when_committed(lambda: ds.delete(old), deletes=old)
        assert taken.wait(60)
        saves.wait()
    assert not old.exists()


def test_failures_in_a_row_end_the_training_and_a_last_line_counts_them(tmp_path, caplog):
    with pytest.raises(ds.errors.UnsupportedTensorError):
        BackgroundSaves({}, 1).start(REFUSED, tmp_path / "path")
    saves = BackgroundSaves({})
    saves.start(STATE, tmp_path / "0")
    saves.wait()
    for number in range(1, 6):
        saves.start(REFUSED, tmp_path / str(number))
    with pytest.raises(ds.errors.UnsupportedTensorError):
        saves.start(STATE, tmp_path / "6")
    saves.start(STATE, tmp_path / "7")
    with caplog.at_level("INFO"):
        saves.wait()
        saves.wait()
    lines = [each for each in caplog.messages if "saves committed" in each]
    assert len(lines) == 1
    assert "2 saves committed, 5 failed" in lines[0]
    assert str(tmp_path / "7") in lines[0]


def test_options_are_taken_and_checked():
    saves = {"host_cache_size": "64MiB", "max_in_flight": 2}
    loads = {"missing": "warn", "rename": {"a": "b"}}
    keywords = {**saves, "precision": "32", **loads}
    assert pop_options(keywords) == (saves, loads)
    assert keywords == {"precision": "32"}
    with pytest.raises(ds.errors.ConfigurationError, match="max_failures"):
        BackgroundSaves({}, max_failures="no")


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"when_behind": "never"}, "when_behind"),
        ({"missing": "some"}, "missing='some'"),
        ({"max_inflight": 2, "accelerator": "cpu"}, "'max_inflight'; did you mean 'max_in_flight'"),
        ({"mising": "warn"}, "'mising'; did you mean 'missing'"),
    ],
)
def test_options_that_cannot_work_are_refused(keywords, said):
    with pytest.raises(ds.errors.ConfigurationError, match=said):
        pop_options(keywords)
