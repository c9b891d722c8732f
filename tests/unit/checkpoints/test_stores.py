"""Checkpoints in an object store: what a store does otherwise than a directory, or fails at."""

import contextlib
import dataclasses
import errno

import pytest
import torch
from support.simulated.object_stores import Fate, installed
from support.state.checkpoints import load_everything, raises, save
from support.state.states import filled

import dcp_datastates
from dcp_datastates import delete, latest, retain, verify
from dcp_datastates.errors import CheckpointNotFoundError, StorageError
from dcp_datastates.storage import attempts, decisions
from dcp_datastates.storage.object_path import locate


def state(seed):
    return {"w": filled((300_000,), torch.float32, seed)}


@pytest.fixture
def root(store, monkeypatch):
    return str(installed(monkeypatch, store).parent)


@pytest.fixture
def three(root):
    """A root with three checkpoints, of which the newest has the smallest name."""
    for number, name in enumerate(("step-2", "step-3", "step-1")):
        save(state(number), f"{root}/{name}")
    return root


def _keys(store, url):
    key = locate(url).key
    return [each for each in store.objects if each.startswith(f"{key}/")]


def _data_keys(store, url):
    return [each for each in _keys(store, url) if each.endswith(".safetensors")]


# ---- finding -----------------------------------------------------------------------------------


def test_latest_of_many_takes_two_listings_and_a_few_reads(store, root):
    save(state(0), f"{root}/step-0")
    original = locate(f"{root}/step-0")
    (attempt,) = attempts.present(original)
    parent = original.parent.key
    # As many checkpoints of earlier attempts: only names and sizes matter to the search.
    for number in range(1, 1000):
        older = attempt.name[:-3] + "000"
        for key in list(store.objects):
            if key.startswith(f"{original.key}/"):
                copied = key.replace("/step-0/", f"/step-{number}/").replace(attempt.name, older)
                store.objects[copied] = store.objects[key]
        entry = f"{parent}/.attempts/{(1 << 64) - 2 - number:016x}-ffffffffffffffff.step-{number}"
        store.objects[entry] = store.objects[next(k for k in store.objects if "/.attempts/" in k)]
    store.counts.clear()
    assert str(latest(root)) == f"{root}/step-0"
    # Two of the root and its index, one of the checkpoint's prefix, one of its attempt's for the sizes.
    assert store.counts["list"] <= 4
    assert store.counts["get"] + store.counts["get_range"] + store.counts["size"] <= 5


def test_latest_takes_the_place_that_it_has_returned(three):
    newest = latest(three)
    assert newest is not None
    assert latest(newest.parent) == newest
    assert latest([newest.parent]) == [newest]


def test_a_checkpoint_that_another_tool_has_copied_without_an_entry_is_found(store, three):
    for key in [key for key in store.objects if "/.attempts/" in key]:
        del store.objects[key]
    assert str(latest(three)) == f"{three}/step-1"


def test_one_with_a_missing_or_cut_object_is_left_out(store, three, caplog):
    (key,) = _data_keys(store, f"{three}/step-1")
    del store.objects[key]
    assert str(latest(three)) == f"{three}/step-3"
    assert "missing" in caplog.text


@pytest.mark.parametrize("kind", ["list", "get"])
def test_a_store_that_fails_is_an_error_and_never_none(store, three, kind):
    def fate(request):
        return Fate.REFUSED if request.kind == kind else Fate.DONE

    store.on_request = fate
    with pytest.raises(StorageError):
        latest(three)
    with pytest.raises(StorageError):
        retain(three, keep=1)


@pytest.mark.parametrize(
    "page", [b"<!DOCTYPE html>\n<html>", b"\n<html>", b"<?xml version='1.0'?>"]
)
def test_the_page_of_a_proxy_is_no_damage_and_never_none(store, three, page):
    """A captive portal answers 200 to all requests."""
    newest = locate(f"{three}/step-1")
    (attempt,) = attempts.present(newest)
    key = decisions.decision_path(newest, attempt).key
    page += b" " * decisions.LONGEST_MARK
    store.objects[key] = dataclasses.replace(store.objects[key], data=page)
    for ask in (
        latest,
        lambda root: retain(root, keep=1),
        lambda root: load_everything(f"{root}/step-1"),
    ):
        with raises(StorageError, "step-1", "web page", "proxy"):
            ask(three)


def test_a_root_is_empty_where_a_policy_grants_the_list_of_one_prefix_alone(store, root):
    """A request for an object that is missing, which names no prefix, is then refused in place of "no such object"."""

    def fate(request):
        if request.kind in ("get", "size") and request.key not in store.objects:
            raise StorageError(errno.EACCES, "AccessDenied", request.key)
        return Fate.DONE

    store.on_request = fate
    assert latest(root) is None
    assert dcp_datastates.CheckpointManager(root, every=1).restore_latest({"w": 0}) is None
    with raises(CheckpointNotFoundError, root):
        load_everything(f"{root}/step-1")
    save(state(1), f"{root}/step-1")
    assert str(latest(root)) == f"{root}/step-1"


def test_verify_asks_a_store_that_has_given_up_no_more(store, three):
    """It has repeated the request itself, for a minute."""
    store.on_request = lambda request: Fate.REFUSED if request.kind == "size" else Fate.DONE
    store.counts.clear()
    with pytest.raises(StorageError):
        verify(f"{three}/step-1")
    assert store.counts["size"] == 1


# ---- pinning and deleting ------------------------------------------------------------------------


class _CutOff(BaseException):
    pass


@pytest.mark.parametrize("at", range(12))
def test_a_deletion_that_is_cut_off_leaves_a_whole_checkpoint_or_none(store, three, at):
    changes = iter(range(at))

    def fate(request):
        if request.changes and next(changes, None) is None:
            raise _CutOff
        return Fate.DONE

    path = f"{three}/step-3"
    store.on_request = fate
    with contextlib.suppress(_CutOff):
        delete(path)
    store.on_request = lambda request: Fate.DONE
    try:
        assert verify(path).whole
        delete(path)  # a later call goes on
    except CheckpointNotFoundError:
        retain(three, keep=1)
    assert not _keys(store, path)
    assert not [key for key in store.objects if key.endswith(".step-3")], "its entry in the index"
    assert str(latest(three)) == f"{three}/step-1"


def test_retain_removes_what_a_killed_save_has_left(store, three):
    folder = locate(f"{three}/step-9")
    older = decisions.decision_path(folder, attempts.present(locate(f"{three}/step-2"))[0])
    key = older.key.replace("decision", "r00000-0.safetensors")
    store.objects[key] = store.objects[_data_keys(store, f"{three}/step-2")[0]]
    retain(three, keep=1)
    assert key not in store.objects


# ---- copying -------------------------------------------------------------------------------------


def test_a_copy_goes_down_and_up_again_and_is_the_same(store, three, tmp_path):
    source = f"{three}/step-3"
    local = dcp_datastates.copy(source, tmp_path / "copy")
    assert verify(local).whole
    up = dcp_datastates.copy(local, f"{three}/other/step-3")
    assert verify(up).whole
    assert latest(str(up.parent)) == up
    original = {key.rpartition("/")[2]: store.data(key) for key in _data_keys(store, source)}
    copied = {key.rpartition("/")[2]: store.data(key) for key in _data_keys(store, str(up))}
    assert copied == original
    assert dcp_datastates.copy(source, local) == local, "it is there already"


@pytest.mark.parametrize("to", ["a store", "a directory"])
def test_a_copy_that_was_cut_off_goes_on_and_copies_again_what_was_damaged_on_the_way(
    to, store, three, tmp_path, monkeypatch
):
    target = f"{three}/copy" if to == "a store" else str(tmp_path / "copy")
    (name,) = [key.split("/step-3/")[1] for key in _data_keys(store, f"{three}/step-3")]

    def cut_off(*_):
        raise StorageError(5, "cut off", target)

    with monkeypatch.context() as patch:
        patch.setattr("dcp_datastates.storage.decisions.decide_alone", cut_off)
        with pytest.raises(StorageError, match="cut off"):
            dcp_datastates.copy(f"{three}/step-3", target)
    with pytest.raises(CheckpointNotFoundError):
        verify(target)
    if to == "a store":
        store.put(f"run/copy/{name}", _damaged(store.data(f"run/copy/{name}")))
    else:
        (tmp_path / "copy" / name).write_bytes(_damaged((tmp_path / "copy" / name).read_bytes()))
    dcp_datastates.copy(f"{three}/step-3", target)
    assert verify(target).whole


def _damaged(data):
    return data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]


def test_a_copy_of_what_lacks_a_file_says_so(tmp_path):
    dcp_datastates.save({"w": torch.ones(9)}, tmp_path / "c")
    next((tmp_path / "c").glob("*/*.safetensors")).unlink()
    with raises(dcp_datastates.errors.CheckpointCorruptError, "r00000-0.safetensors"):
        dcp_datastates.copy(tmp_path / "c", tmp_path / "copy")


def test_another_checkpoint_at_the_target_stays(three, tmp_path):
    with raises(dcp_datastates.errors.CheckpointExistsError, "step-2"):
        dcp_datastates.copy(f"{three}/step-3", f"{three}/step-2")
    assert verify(f"{three}/step-2").whole
