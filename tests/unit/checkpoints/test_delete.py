"""``delete`` removes one checkpoint of this package, and nothing else."""

import contextlib
import errno
import itertools
import os
import shutil

import pytest
import torch
from support.state.checkpoints import committed, load_everything, raises, save
from support.state.files import flip_bit
from support.state.metadata import decision_of, with_format
from support.state.roots import NEWER, OLDER, save_stock, uncommitted

from dcp_datastates import delete, pin, retain, unpin
from dcp_datastates.checkpoints.delete import delete_committed
from dcp_datastates.checkpoints.find import open_found
from dcp_datastates.commit.place import EndedPart, Place, Round
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    CheckpointSupersededError,
    ConfigurationError,
    ForeignCheckpointError,
    StorageError,
)
from dcp_datastates.storage import claims, operations
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Neighbours


@pytest.fixture
def path(tmp_path):
    save({"w": torch.arange(1000.0), "step": 3}, tmp_path / "ckpt" / "step-3")
    return tmp_path / "ckpt" / "step-3"


def test_a_checkpoint_goes_with_its_directory_and_its_neighbours_stay(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    save({"w": torch.ones(3)}, path.with_name("step-4"))
    uncommitted(path, OLDER)  # abandoned
    delete("step-3")
    assert os.listdir(path.parent) == ["step-4"]
    assert load_everything(path.with_name("step-4"))["w"].eq(1).all()
    with pytest.raises(CheckpointNotFoundError):
        delete(path)


def test_what_others_put_there_stays_and_is_named(path, caplog):
    (path / "notes.txt").write_text("mine")
    (folder,) = (entry for entry in path.iterdir() if entry.is_dir())
    (folder / "r00000-0.safetensors.bak").write_text("mine, too")
    delete(path)
    assert not committed(path)
    assert sorted(p.name for p in path.rglob("*") if p.is_file()) == [
        "decision",
        "notes.txt",
        "r00000-0.safetensors.bak",
    ]
    assert "notes.txt" in caplog.text


def _during_each_step(monkeypatch, of, do):
    """Call ``of`` again and again, and ``do`` before its first step, then before its second, and so on."""
    for when in itertools.count():
        steps, done = [], []

        def hit(name, steps=steps, done=done, when=when):
            if name.endswith(".before") and not done:
                steps.append(name)
                if len(steps) > when:
                    done.append(name)
                    do(when)

        with monkeypatch.context() as patch:
            patch.setattr(operations, "hit", hit)
            with contextlib.suppress(StorageError):
                of()
        if not done:
            assert when > 10
            return
        yield when, done[0]


class _Crash(BaseException):
    pass


@pytest.mark.parametrize(
    "finish", [delete, lambda path: retain(path.parent, keep=1)], ids=["delete", "retain"]
)
def test_a_crash_leaves_a_whole_checkpoint_or_none_and_another_call_finishes(
    finish, path, monkeypatch
):
    """It is deleted with the rename that replaces the decision, and not before."""
    save({"w": torch.ones(3)}, path.with_name("step-4"))
    kept = path.parent.with_name("kept")
    shutil.copytree(path, kept)

    def crash(when):
        raise _Crash

    def remove():
        with contextlib.suppress(_Crash):
            delete(path)

    steps, stays = [], []
    for _, step in _during_each_step(monkeypatch, remove, crash):
        steps.append(step)
        stays.append(committed(path))
        if stays[-1]:
            assert load_everything(path)["step"] == 3, step
            assert (path / ".metadata").exists(), step  # what other tools look for
        if path.exists() and os.listdir(path):
            finish(path)
        assert not path.exists() or not os.listdir(path), step
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(kept, path)
    renames = (at for at, step in enumerate(steps) if step == "delete.rename.before")
    _, of_the_decision, _ = renames  # the first is the marker's, the last the attempt's folder's
    assert stays == [at <= of_the_decision for at in range(len(steps))]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_a_link_that_takes_a_name_meanwhile_leads_to_nothing(inner, whole, path, monkeypatch):
    """Who may write in the root puts it where the checkpoint is, or its attempt; it leads to a copy elsewhere."""
    (path / "others").mkdir()
    (path / "others" / "notes.txt").write_text("mine")
    kept, copy = path.parent.with_name("kept"), path.parent.with_name("copy")
    (attempt,) = (entry.name for entry in path.iterdir() if Attempt.parse(entry.name))
    for each in (kept, copy):
        shutil.copytree(path, each)

    def swap(when):
        taken = path / attempt if inner else path
        if taken.exists():
            taken.rename(path.with_name("aside"))
            taken.symlink_to(copy / attempt if inner else copy)

    def remove():
        delete_committed(open_found(path), whole=whole)

    for when, step in _during_each_step(monkeypatch, remove, swap):
        assert _files(copy) == _files(kept), f"step {when} ({step})"
        shutil.rmtree(path.parent)
        shutil.copytree(kept, path)


def _files(folder):
    return {
        each.relative_to(folder): each.read_bytes() for each in folder.rglob("*") if each.is_file()
    }


def test_what_is_committed_during_a_deletion_stays(path, monkeypatch):
    """The deletion removes none of it."""
    saved = []

    def save_over(number):
        save({"w": torch.full((1000,), float(number)), "step": number}, path)
        saved.append(number)

    for when, step in _during_each_step(monkeypatch, lambda: delete(path), save_over):
        assert saved == [when]
        assert load_everything(path)["step"] == saved.pop(), step


def test_what_is_pinned_during_a_deletion_stays(path, monkeypatch):
    """Or :func:`pin` says that it is gone, or is being deleted."""
    pinned = []

    def pin_it(_):
        with contextlib.suppress(CheckpointNotFoundError, StorageError):
            pin(path)
            pinned.append(1)

    ends = set()
    for _, step in _during_each_step(monkeypatch, lambda: delete(path), pin_it):
        assert committed(path) or not pinned, step
        ends.add(bool(pinned))
        pinned.clear()
        unpin(path)
        save({"w": torch.arange(1000.0), "step": 3}, path)
    assert ends == {True, False}


def test_a_save_that_failed_can_be_deleted(path):
    decision_of(path).unlink()
    (path / ".metadata").unlink()
    delete(path)
    assert not path.exists()


def test_a_newer_save_that_may_be_in_flight_is_named_and_nothing_is_touched(path):
    uncommitted(path, NEWER)
    before = sorted(path.rglob("*"))
    with pytest.raises(StorageError, match=NEWER) as caught:
        delete(path)
    assert caught.value.errno == errno.EBUSY
    assert str(path) in str(caught.value)
    assert sorted(path.rglob("*")) == before
    shutil.rmtree(path / NEWER)
    uncommitted(path, OLDER)
    delete(path)
    assert not path.exists()


def test_a_slow_save_that_is_deleted_cannot_be_committed_any_more(path):
    claim = claims.claim(path.with_name("slow"), Neighbours(), True)
    delete(path.with_name("slow"))
    save = Round(0, claim.attempt, path.with_name("slow"), EndedPart(), timeout=1.0, claim=claim)
    with pytest.raises(CheckpointSupersededError):
        Place(path.with_name("slow")).publish(save, b"x" * 1000)
    assert not path.with_name("slow").exists()


# --- what is not one of ours ----------------------------------------------------------------------------


def test_what_is_no_checkpoint_is_left_alone_and_named(path, tmp_path):
    root = path.parent
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for where, words in {
        root: "checkpoints below it",
        tmp_path / "nowhere": "does not exist",
        tmp_path / "empty": "empty",
        tmp_path / "file": "file",
    }.items():
        with raises(CheckpointNotFoundError, str(where), words):
            delete(where)
    assert committed(path)
    assert (tmp_path / "empty").exists()
    assert (tmp_path / "file").exists()


def test_a_stock_checkpoint_is_left_alone(path, tmp_path):
    stock = tmp_path / "stock"
    save_stock(stock)
    uncommitted(stock, OLDER)
    before = sorted(stock.rglob("*"))
    with pytest.raises(ForeignCheckpointError):
        delete(stock)
    assert sorted(stock.rglob("*")) == before


def test_what_another_program_has_saved_over_a_checkpoint_is_left_alone(path):
    save_stock(path)
    theirs = {each: each.read_bytes() for each in path.iterdir() if each.is_file()}
    assert path / ".metadata" in theirs
    delete(path)
    assert {each: each.read_bytes() for each in path.iterdir()} == theirs


def test_a_symbolic_link_is_refused_with_what_it_points_to(path, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(path)
    with raises(ConfigurationError, "symbolic link", str(path)):
        delete(link)
    assert committed(path)
    assert link.is_symlink()


def test_damaged_metadata_can_be_deleted_and_those_of_another_format_are_not(path):
    good = decision_of(path).read_bytes()
    save({"w": torch.ones(3)}, path.with_name("step-4"))
    flip_bit(decision_of(path.with_name("step-4")), 50)
    delete(path.with_name("step-4"))
    assert not path.with_name("step-4").exists()
    file = decision_of(path)
    file.write_bytes(with_format(good, 99))
    with pytest.raises(StorageError, match="has format 99"):
        delete(path)
    assert file.exists()
    file.write_bytes(good)
    assert committed(path)
