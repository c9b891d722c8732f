"""What storage cannot do is found before the first save, which goes without it, or is refused by name."""

import errno
import logging
import os
import shutil
import threading
import time

import pytest
import torch
from support.simulated.object_stores import Fate, MemoryStore, creates_once, installed
from support.state.checkpoints import assert_same, load, save

import dcp_datastates
from dcp_datastates.errors import StorageError
from dcp_datastates.storage import bounded as bounded_work
from dcp_datastates.storage import self_test
from dcp_datastates.storage.claims import Neighbours, claim
from dcp_datastates.storage.self_test import Operation, examine, what_works
from dcp_datastates.storage.store_calls import ExpiredError

STATE = {"w": torch.arange(1000.0)}


def saves_and_loads(path):
    save(STATE, path)
    assert_same(load({"w": torch.zeros(1000)}, path), STATE)


def claimed(path):
    return claim(path, Neighbours(), overwrite=True)


# ---- object stores -------------------------------------------------------------------------------


class Racing(MemoryStore):
    """Looks for the object, then stores it: two at once both succeed."""

    def __init__(self):
        super().__init__()
        self.together = threading.Barrier(2)
        self.raced = iter([True, True])

    def put_if_absent(self, key, data):
        if next(self.raced, False):
            missing = key not in self.objects
            self.together.wait()
            if missing:
                self._store(key, data)
            return missing
        return super().put_if_absent(key, data)


class Forgetful(MemoryStore):  # of creations at the same time one succeeds, and a later one, too
    def put_if_absent(self, key, data):
        return super().put_if_absent(key, data) or not data


def without(*kinds, number=errno.EACCES):
    """A store that refuses requests of these kinds."""

    def refuse(request):
        if request.kind in kinds:
            raise StorageError(number, "AccessDenied", request.key)
        return Fate.DONE

    return MemoryStore(refuse)


def test_a_good_store_is_tried_once_with_few_requests_and_left_as_it_was(monkeypatch):
    store = MemoryStore()
    root = installed(monkeypatch, store, "run")
    assert all(each.works for each in what_works(root).answers)
    assert store.objects == {}
    assert store.requests() <= 12
    store.counts.clear()
    what_works(root)
    assert store.requests() == 0


@pytest.mark.parametrize("store", [MemoryStore(create_only=False), Racing(), Forgetful()])
def test_a_store_with_two_winners_is_found_and_said_once(monkeypatch, caplog, store):
    root = installed(monkeypatch, store, "run")
    with caplog.at_level(logging.WARNING):
        assert not creates_once(root)
        assert not creates_once(root)
    assert len(caplog.records) == 1
    assert "docs/stores.md" in caplog.text


def test_a_store_that_cannot_create_only_is_no_error(monkeypatch):
    class Plain(MemoryStore):
        def put_if_absent(self, key, data):
            raise StorageError(errno.EOPNOTSUPP, "not supported", key)

    assert not creates_once(installed(monkeypatch, Plain(), "run"))


def test_lost_replies_do_not_condemn_a_store(monkeypatch):
    store = MemoryStore(
        lambda request: Fate.RETRIED if request.kind == "put_if_absent" else Fate.DONE
    )
    assert creates_once(installed(monkeypatch, store, "run"))


@pytest.mark.parametrize("kind", ["put", "put_if_absent", "get_range", "list", "delete", ""])
def test_expired_credentials_and_no_answer_tell_nothing_of_a_store(monkeypatch, kind):
    def refuse(request):
        if request.kind == kind:
            raise ExpiredError(errno.EACCES, "ExpiredToken", request.key)
        return Fate.DONE if kind else Fate.REFUSED

    store = MemoryStore(refuse)
    root = installed(monkeypatch, store, "run")
    with pytest.raises(StorageError, match="ExpiredToken" if kind else "503"):
        what_works(root)
    store.on_request = lambda request: Fate.DONE
    assert all(each.works for each in what_works(root).answers)


@pytest.mark.parametrize("times", [1, 1000])
def test_a_deletion_that_fails_tells_nothing_of_later_ones(monkeypatch, caplog, times):
    left = iter(range(times))

    def fail(request):
        if request.kind == "delete" and next(left, None) is not None:
            return Fate.REFUSED
        return Fate.DONE

    store = MemoryStore(fail)
    path = installed(monkeypatch, store)
    for _ in range(3):
        saves_and_loads(path)
    if times == 1:
        assert sum(key.endswith(".safetensors") for key in store.objects) == 1
    assert "stays there" in caplog.text


def test_where_no_more_threads_start_none_stays(monkeypatch):
    root, start, left = (
        installed(monkeypatch, MemoryStore(), "run"),
        threading.Thread.start,
        iter("ab"),
    )

    def start_two(thread):
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    before = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_two)
        with pytest.raises(StorageError, match="no more threads"):
            what_works(root)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
    assert creates_once(root)


def test_a_slow_store_that_answers_is_not_given_up(monkeypatch):
    """All requests together take longer than one may."""

    def slowly(request):
        time.sleep(0.04)
        return Fate.DONE

    root = installed(monkeypatch, MemoryStore(slowly), "run")
    monkeypatch.setattr(bounded_work, "_LOOK_SECONDS", 0.01)
    assert bounded_work.bounded("trying", root, 0.2, lambda: creates_once(root))


def test_credentials_that_may_not_delete_suffice_for_saves_and_that_is_said_once(
    monkeypatch, caplog
):
    store = without("delete")
    path = installed(monkeypatch, store)
    with caplog.at_level(logging.WARNING):
        for value in range(3):  # over one another
            save({"w": torch.full((10,), float(value))}, str(path))
    assert load({"w": torch.zeros(10)}, str(path))["w"][0] == 2
    assert str(dcp_datastates.latest(str(path.parent))) == str(path)
    (said,) = [each.getMessage() for each in caplog.records if "delete" in each.getMessage()]
    assert "AccessDenied" in said
    assert "s3:DeleteObject" in said


def test_a_deletion_that_is_not_allowed_leaves_the_checkpoint(monkeypatch):
    path = installed(monkeypatch, without("delete"))
    for step in (1, 2):
        save(STATE, str(path.parent / f"step-{step}"))
    calls = (
        lambda: dcp_datastates.retain(str(path.parent), keep=1),
        lambda: dcp_datastates.delete(str(path.parent / "step-2")),
    )
    for call in calls:
        with pytest.raises(StorageError, match="AccessDenied"):
            call()
    for step in (1, 2):
        assert_same(load({"w": torch.zeros(1000)}, str(path.parent / f"step-{step}")), STATE)


@pytest.mark.parametrize(
    ("kind", "number", "way_out"),
    [
        ("put", errno.EACCES, "s3:PutObject"),
        ("list", errno.EACCES, "s3:ListBucket"),
        ("get_range", errno.EACCES, "s3:GetObject"),
        ("get_range", errno.EOPNOTSUPP, "status 206"),
    ],
)
def test_a_permission_without_which_no_save_works_is_named_before_anything_is_saved(
    monkeypatch, kind, number, way_out
):
    store = without(kind, number=number)
    path = installed(monkeypatch, store)
    for _ in range(2):  # it is not remembered
        with pytest.raises(StorageError, match=way_out):
            claimed(path)
    assert store.objects == {}
    store.on_request = lambda request: Fate.DONE
    claimed(path)


# ---- directories ---------------------------------------------------------------------------------


def refusing(name, number, *, if_=lambda *paths: True):
    """A file system that refuses a system call."""

    def patch(monkeypatch):
        call = getattr(os, name)

        def refuse(*arguments, **more):
            if if_(*arguments):
                raise OSError(number, os.strerror(number))
            return call(*arguments, **more)

        monkeypatch.setattr(os, name, refuse)

    return patch


def is_filled(path, *rest):
    return os.path.isdir(path) and next(os.scandir(path), None) is not None


def replaces_by_a_link(monkeypatch):
    monkeypatch.setattr(os, "link", lambda old, new, **_: shutil.copyfile(old, new))


DENIED = refusing("unlink", errno.EPERM)

GOES_WITHOUT = {
    "replace": (
        Operation.REPLACE,
        refusing("rename", errno.EEXIST, if_=lambda a, b: os.path.isfile(b)),
    ),
    "delete": (Operation.DELETE, DENIED),
    "create once": (Operation.CREATE_ONCE, replaces_by_a_link),
}
NO_LACK = {
    "link": refusing("link", errno.EPERM),
    "link in FUSE": refusing("link", errno.ENOSYS),
    "gcsfuse": refusing("rename", errno.EMFILE, if_=is_filled),
    "overlayfs": refusing("rename", errno.EXDEV, if_=is_filled),
}
NEEDS = {
    "unreadable": (Operation.LIST, refusing("scandir", errno.EACCES), "permission to read"),
}


def test_a_good_file_system_is_tried_once_and_left_as_it_was(monkeypatch, tmp_path, caplog):
    saves_and_loads(tmp_path / "step-1")
    assert os.listdir(tmp_path) == ["step-1"]
    assert caplog.records == []
    monkeypatch.setattr(self_test, "examine", lambda root: pytest.fail("it is known"))
    saves_and_loads(tmp_path / "step-2")


@pytest.mark.parametrize("lack", GOES_WITHOUT)
def test_a_save_goes_without_what_a_file_system_lacks_and_says_so_once(
    monkeypatch, tmp_path, caplog, lack
):
    operation, patch = GOES_WITHOUT[lack]
    patch(monkeypatch)
    with caplog.at_level(logging.DEBUG, self_test.__name__):
        saves_and_loads(tmp_path / "step-1")
        saves_and_loads(tmp_path / "step-2")
    said = [each for each in caplog.records if each.name == self_test.__name__]
    assert [operation.value in each.getMessage() for each in said] == [True]
    assert not what_works(tmp_path).works(operation)


@pytest.mark.parametrize("lack", NEEDS)
def test_what_a_save_needs_is_missed_by_name_before_anything_is_written(
    monkeypatch, tmp_path, lack
):
    operation, patch, way_out = NEEDS[lack]
    with monkeypatch.context() as patched:
        patch(patched)
        with pytest.raises(StorageError, match=way_out) as raised:
            claimed(tmp_path / "step-1")
        assert operation.value in str(raised.value)
        found = examine(tmp_path)
        assert found.missing is not None
        assert found.missing.operation is operation
    assert os.listdir(tmp_path / "step-1") == []
    saves_and_loads(tmp_path / "step-1")  # mounted otherwise


@pytest.mark.parametrize("refused", NO_LACK.values(), ids=NO_LACK)
def test_one_way_to_create_once_is_enough(monkeypatch, tmp_path, refused):
    refused(monkeypatch)
    saves_and_loads(tmp_path / "step-1")
    assert what_works(tmp_path).works(Operation.CREATE_ONCE)


@pytest.mark.parametrize("call", ["mkdir", "rename", "fsync", "stat"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_storage_in_trouble_says_nothing_about_what_it_can_do(monkeypatch, tmp_path, call, number):
    with monkeypatch.context() as patched:
        refusing(call, number)(patched)
        with pytest.raises(StorageError) as raised:
            what_works(tmp_path)
        assert raised.value.errno == number
    assert all(each.works for each in what_works(tmp_path).answers)


def test_what_a_killed_self_test_left_is_no_checkpoint_and_goes_with_the_directory(tmp_path):
    left = tmp_path / "step-1" / ".self-test.0123456789abcdef~"
    saves_and_loads(left.parent)
    for name in ("a", "b", ".a.0123456789abcdef~"):
        left.mkdir(exist_ok=True)
        (left / name).touch()
    dcp_datastates.delete(left.parent)
    assert os.listdir(tmp_path) == []
