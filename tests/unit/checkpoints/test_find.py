"""``latest`` finds the newest checkpoint that is whole; ``retain`` never deletes one that may be needed."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.checkpoints import assert_same, committed, load_everything, raises, save
from support.files import data_files, flip_bit
from support.metadata import with_format

from dcp_datastates import (
    ConfigurationError,
    NoAnswerError,
    StorageError,
    latest,
    retain,
    verify,
)
from dcp_datastates.checkpoints import listing
from dcp_datastates.checkpoints.answers import from_first_rank
from dcp_datastates.checkpoints.listing import natural_order, step_of
from dcp_datastates.storage import lock, operations

NEWER_ATTEMPT = "7fffffffffffffff-00000001"
OLDER_ATTEMPT = "0000000000000001-00000001"


def _state(number):
    return {"w": torch.full((1000,), float(number)), "step": number}


@pytest.fixture
def root(tmp_path):
    """Three checkpoints, saved in the order of their names; and things that are none."""
    root = tmp_path / "ckpt"
    for number in (9, 10, 11):
        save(_state(number), root / f"step-{number}")
    (root / "logs").mkdir()
    (root / "logs" / "events.txt").write_text("x")
    (root / "notes.txt").write_text("x")
    return root


def _stock(path):
    dcp.save(_state(0), storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def _names(root):
    return sorted(path.name for path in root.iterdir() if committed(path))


def _attempt(path, name, size=100):
    """What a save that has not committed has on storage."""
    folder = path / name
    folder.mkdir(parents=True)
    (folder / "r00000-0.safetensors").write_bytes(b"x" * size)
    return folder


# --- latest -----------------------------------------------------------------------------------------


def test_the_newest_is_found(root):
    assert latest(root) == root / "step-11"
    assert latest(str(root)) == root / "step-11"
    assert_same(load_everything(latest(root)), _state(11))


def test_newest_is_what_was_saved_last_whatever_it_is_called(root):
    save(_state(9), root / "step-9")
    assert latest(root) == root / "step-9"


def test_copies_are_told_apart_by_name_in_natural_order(tmp_path):
    save(_state(1), tmp_path / "step-9")
    for name in ("step-10", "step-8"):
        shutil.copytree(tmp_path / "step-9", tmp_path / name)
    assert latest(tmp_path) == tmp_path / "step-10"


def test_a_link_to_a_checkpoint_gives_way_to_the_checkpoint(root):
    (root / "zz-current").symlink_to("step-11")
    assert latest(root) == root / "step-11"


def test_natural_order_and_steps():
    names = ["step-10", "step-9", "a", "step-9b", "", "10", "9", "step-010"]
    ordered = sorted(names, key=natural_order)
    assert ordered.index("step-9") < ordered.index("step-9b") < ordered.index("step-10")
    assert ordered.index("9") < ordered.index("10")
    assert [step_of(name) for name in ("step-12", "12", "best", "step-3-best")] == [
        12,
        12,
        None,
        None,
    ]


def test_nothing_there_is_none(tmp_path, caplog):
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    (tmp_path / "empty").mkdir()
    _attempt(tmp_path / "step-1", OLDER_ATTEMPT)
    _stock(tmp_path / "stock")
    assert latest(tmp_path) is None
    assert not caplog.records


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(ConfigurationError, "file"):
        latest(tmp_path / "file")


def test_a_checkpoint_itself_is_refused_and_told_what_to_pass(root):
    with raises(ConfigurationError, "itself a checkpoint", str(root)):
        latest(root / "step-9")


def test_a_root_that_is_a_checkpoint_too_is_searched_with_a_warning(root, caplog):
    save(_state(1), root)
    assert latest(root) == root / "step-11"
    assert "itself a checkpoint" in caplog.text


@pytest.mark.parametrize("verify", ["", "all", True, None])
def test_unknown_verification_is_refused(verify, root):
    with raises(ConfigurationError, "structure"):
        latest(root, verify=verify)


def _damage_metadata(path):
    flip_bit(path / ".metadata", 50)


def _cut_metadata(path):
    os.truncate(path / ".metadata", 50)


def _cut(path):
    file = data_files(path)[0]
    os.truncate(file, file.stat().st_size - 1)


def _grow(path):
    with data_files(path)[0].open("ab") as file:
        file.write(b"x")


def _lose(path):
    data_files(path)[0].unlink()


def _lose_all(path):
    shutil.rmtree(data_files(path)[0].parent)


def _another_version(path):
    file = path / ".metadata"
    file.write_bytes(with_format(file.read_bytes(), 99))


def _the_first_version(path):
    file = path / ".metadata"
    file.write_bytes(with_format(file.read_bytes(), 1))


STRUCTURAL = [
    _damage_metadata,
    _cut_metadata,
    _cut,
    _grow,
    _lose,
    _lose_all,
    _another_version,
    _the_first_version,
]


@pytest.mark.parametrize("damage", STRUCTURAL, ids=lambda damage: damage.__name__)
def test_a_broken_one_is_left_out_with_a_warning_that_says_why(damage, root, caplog):
    damage(root / "step-11")
    assert latest(root) == root / "step-10"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "step-11" in record.getMessage()
    words = {_lose: "missing", _lose_all: "missing", _cut: "cut", _grow: "long"}
    assert words.get(damage, ".metadata") in record.getMessage()


def test_several_broken_ones_and_none_left(root):
    _lose(root / "step-11")
    _cut(root / "step-10")
    assert latest(root) == root / "step-9"
    _damage_metadata(root / "step-9")
    assert latest(root) is None


def test_what_is_verified_is_what_was_asked_for(root):
    (file,) = data_files(root / "step-11")
    flip_bit(file, file.stat().st_size // 2)
    assert latest(root) == root / "step-11", "the structure is whole"
    assert latest(root, verify="full") == root / "step-10"
    _lose(root / "step-11")
    assert latest(root, verify="metadata") == root / "step-11"


def test_an_uncommitted_newer_save_is_not_it(root):
    _attempt(root / "step-12", NEWER_ATTEMPT)
    _attempt(root / "step-9", NEWER_ATTEMPT)
    assert latest(root) == root / "step-11"


def test_only_what_is_needed_is_opened(root, monkeypatch):
    opened = []
    real = listing.open_committed

    def counting(path):
        opened.append(path.name)
        return real(path)

    monkeypatch.setattr(listing, "open_committed", counting)
    assert latest(root) == root / "step-11"
    assert opened == ["step-11"]


def test_one_that_is_replaced_while_it_is_looked_at_is_looked_at_again(root, monkeypatch, caplog):
    real, calls = os.stat, []

    def stat(path, *arguments, **options):
        if str(path).endswith(".safetensors") and not calls:
            calls.append(path)
            save(_state(12), root / "step-11")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert latest(root) == root / "step-11"
    assert calls
    assert not caplog.records


# --- retain: what goes, what stays ---------------------------------------------------------------------


def test_the_newest_are_kept_and_the_rest_is_gone_without_a_trace(root):
    assert retain(root, keep=2) == [root / "step-9"]
    assert not (root / "step-9").exists()
    assert _names(root) == ["step-10", "step-11"]
    assert (root / "logs" / "events.txt").exists()
    assert (root / "notes.txt").exists()
    for name in _names(root):
        assert verify(root / name).whole


def test_again_there_is_nothing_to_do(root):
    assert retain(root, keep=1) == [root / "step-10", root / "step-9"]
    assert retain(root, keep=1) == []
    assert latest(root) == root / "step-11"


@pytest.mark.parametrize("keep", [3, 4, 1000])
def test_keeping_as_many_as_there_are_or_more_deletes_nothing(keep, root):
    assert retain(root, keep=keep) == []
    assert len(_names(root)) == 3


@pytest.mark.parametrize("keep", [0, -1, 1.0, "2", None, True])
def test_keep_must_be_a_whole_number_above_0(keep, root):
    with raises(ConfigurationError, "keep"):
        retain(root, keep=keep)
    assert len(_names(root)) == 3


def test_no_root_is_nothing_to_delete_and_a_checkpoint_is_refused(root):
    assert retain(root / "nowhere", keep=1) == []
    with raises(ConfigurationError, "itself a checkpoint"):
        retain(root / "step-9", keep=1)
    assert committed(root / "step-9")


@pytest.mark.parametrize("damage", STRUCTURAL, ids=lambda damage: damage.__name__)
def test_a_damaged_newest_does_not_count_and_the_last_good_one_stays(damage, root, caplog):
    damage(root / "step-11")
    damage(root / "step-10")
    assert retain(root, keep=1) == []
    assert committed(root / "step-9")
    assert latest(root) == root / "step-9"
    assert "step-11" in caplog.text


def test_a_flipped_bit_does_not_cost_the_last_sound_one_if_every_byte_is_verified(root):
    for name in ("step-10", "step-11"):
        (file,) = data_files(root / name)
        flip_bit(file, file.stat().st_size // 2)
    assert retain(root, keep=1, verify="full") == []
    assert _names(root) == ["step-10", "step-11", "step-9"]
    save(_state(12), root / "step-12")
    deleted = retain(root, keep=1, verify="full")
    assert deleted == [root / "step-11", root / "step-10", root / "step-9"]
    with pytest.raises(ConfigurationError, match="verify='bytes'"):
        retain(root, keep=1, verify="bytes")


@pytest.mark.parametrize("damage", STRUCTURAL[:5], ids=lambda damage: damage.__name__)
def test_a_damaged_one_goes_once_enough_good_ones_are_newer(damage, root):
    damage(root / "step-9")
    assert retain(root, keep=3) == [], "only two good ones are newer"
    assert (root / "step-9").exists()
    assert retain(root, keep=2) == [root / "step-9"]
    assert not (root / "step-9").exists()


@pytest.mark.parametrize("other", [_another_version, _the_first_version])
def test_one_of_another_format_is_never_deleted(other, root, caplog):
    other(root / "step-9")
    assert retain(root, keep=1) == [root / "step-10"]
    assert committed(root / "step-9")
    assert "step-9" in caplog.text


def test_stock_checkpoints_are_neither_counted_nor_deleted(root):
    _stock(root / "step-12")
    _stock(root / "step-1")
    assert retain(root, keep=2) == [root / "step-9"]
    assert committed(root / "step-12")
    assert committed(root / "step-1")


def test_a_stock_checkpoint_that_a_save_is_about_to_replace_is_not_deleted(root):
    _stock(root / "step-1")
    _attempt(root / "step-1", OLDER_ATTEMPT)
    before = (root / "step-1" / ".metadata").read_bytes()
    retain(root, keep=1)
    assert (root / "step-1" / ".metadata").read_bytes() == before


def test_links_are_neither_counted_nor_followed(root, tmp_path):
    save(_state(1), tmp_path / "elsewhere")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "current").symlink_to("step-11")
    assert retain(root, keep=2) == [root / "step-9"]
    assert committed(tmp_path / "elsewhere")
    assert os.path.islink(root / "current")


def test_foreign_files_stay_and_so_does_their_directory(root, caplog):
    (root / "step-9" / "config.json").write_text("{}")
    folder = data_files(root / "step-10")[0].parent
    (folder / "mine.bin").write_bytes(b"x")
    assert retain(root, keep=1) == [root / "step-10", root / "step-9"]
    assert os.listdir(root / "step-9") == ["config.json"]
    assert os.listdir(root / "step-10") == [folder.name]
    assert sorted(os.listdir(folder)) == ["deleting", "mine.bin"]
    assert "config.json" in caplog.text
    assert retain(root, keep=1) == [], "what is left is not deleted again and again"


# --- retain: saves in flight -----------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", [NEWER_ATTEMPT, OLDER_ATTEMPT])
def test_a_checkpoint_with_an_attempt_in_flight_stays(attempt, root):
    folder = _attempt(root / "step-9", attempt)
    hold = lock.Hold(folder)
    try:
        assert retain(root, keep=1) == [root / "step-10"]
        assert committed(root / "step-9")
        assert os.listdir(folder) == ["r00000-0.safetensors"]
    finally:
        hold.release()
    assert retain(root, keep=1) == [root / "step-9"]
    assert not (root / "step-9").exists(), "the abandoned attempt went with it"


def test_without_locks_a_newer_attempt_counts_as_in_flight_and_an_older_one_does_not(
    root, monkeypatch
):
    monkeypatch.setattr(lock, "in_flight", lambda directory: None)
    _attempt(root / "step-9", NEWER_ATTEMPT)
    _attempt(root / "step-10", OLDER_ATTEMPT)
    assert retain(root, keep=1) == [root / "step-10"]
    assert not (root / "step-10").exists()
    assert committed(root / "step-9")


def test_a_save_that_is_being_published_there_is_not_disturbed(root):
    with lock.exclusive(root / "step-9", 1.0):
        assert retain(root, keep=1) == [root / "step-10"]
    assert committed(root / "step-9")


def test_uncommitted_checkpoints_in_flight_or_newer_stay(root):
    hold = lock.Hold(_attempt(root / "step-8", OLDER_ATTEMPT))
    _attempt(root / "step-12", NEWER_ATTEMPT)
    try:
        retain(root, keep=1)
        assert (root / "step-8" / OLDER_ATTEMPT / "r00000-0.safetensors").exists()
        assert (root / "step-12" / NEWER_ATTEMPT / "r00000-0.safetensors").exists()
    finally:
        hold.release()


def test_a_hold_that_meets_somebody_asking_waits_instead_of_going_without_a_lock(tmp_path):
    asking = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_EX)  # what in_flight() does, for a moment
    timer = threading.Timer(0.2, os.close, [asking])
    timer.start()
    hold = lock.Hold(tmp_path)
    try:
        timer.join()
        assert lock.in_flight(tmp_path)
    finally:
        hold.release()
    assert lock.in_flight(tmp_path) is False


# --- retain: crashes and failures ------------------------------------------------------------------------


class _Crash(BaseException):
    pass


@pytest.mark.parametrize("when", range(18))
def test_a_crash_at_any_operation_leaves_no_half_checkpoint_and_the_next_call_finishes(
    when, root, monkeypatch
):
    done = []

    def counted(name):
        real = getattr(operations, name)

        def operation(path, phase):
            assert phase in ("withdraw", "delete")
            if len(done) == when:
                raise _Crash
            done.append((name, path))
            real(path, phase)

        return operation

    for name in ("unlink", "sync_directory", "remove_directory"):
        monkeypatch.setattr(operations, name, counted(name))
    crashed = False
    try:
        retain(root, keep=1)
    except _Crash:
        crashed = True
    assert crashed == (when <= 15), "else this has tried what it did not mean to"
    for name in _names(root):
        assert verify(root / name).whole
    assert latest(root) == root / "step-11"
    monkeypatch.undo()
    retain(root, keep=1)
    # A crash between the last attempt's end and its directory's leaves that: empty, and nobody's.
    emptied = [path for path in root.glob("step-*") if not os.listdir(path)]
    assert len(emptied) <= 1
    assert {path.name for path in root.glob("step-*")} - {path.name for path in emptied} == {
        "step-11"
    }


def test_each_victim_is_unpublished_durably_before_its_data_go(root, monkeypatch):
    done = []
    for name in ("unlink", "sync_directory", "remove_directory"):
        real = getattr(operations, name)

        def operation(path, phase, name=name, real=real):
            done.append((name, path.relative_to(root).as_posix()))
            real(path, phase)

        monkeypatch.setattr(operations, name, operation)
    (file,) = data_files(root / "step-9")
    folder = f"step-9/{file.parent.name}"
    retain(root, keep=2)
    assert done == [
        ("remove_directory", f"{folder}/publishing"),  # it is not there any more: a save has ended
        ("unlink", "step-9/.metadata"),
        ("sync_directory", "step-9"),
        ("unlink", f"{folder}/{file.name}"),
        ("remove_directory", f"{folder}/deleting"),
        ("remove_directory", folder),
        ("remove_directory", "step-9"),
        ("sync_directory", "."),
    ]


def test_what_the_system_refuses_is_an_error_that_names_the_checkpoint(root, monkeypatch):
    def refuse(path, phase):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(operations, "unlink", refuse)
    with raises(StorageError, "step-9", "Permission denied"):
        retain(root, keep=2)
    assert verify(root / "step-9").whole


def test_somebody_else_deleting_it_too_is_no_error(root, monkeypatch):
    real = operations.unlink

    def unlink(path, phase):
        if path.name == ".metadata":
            shutil.rmtree(path.parent)
        real(path, phase)

    monkeypatch.setattr(operations, "unlink", unlink)
    retain(root, keep=1)
    assert _names(root) == ["step-11"]


# --- without torch.distributed ---------------------------------------------------------------------------


def test_an_answer_without_torch_distributed_is_just_computed():
    assert from_first_rank(lambda: 42, "the answer") == 42
    with raises(ZeroDivisionError):
        from_first_rank(lambda: 1 // 0, "the answer")


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_must_be_above_0(timeout, root):
    with raises(ConfigurationError, "timeout"):
        latest(root, timeout=timeout)


def test_no_answer_is_a_timeout_error():
    assert issubclass(NoAnswerError, TimeoutError)
