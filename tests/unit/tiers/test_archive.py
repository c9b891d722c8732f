"""Checkpoints that are carried to an archive behind training, by one process."""

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.simulated.object_stores import Fate
from support.state.archiving import archived_save, restart
from support.state.checkpoints import raises, save
from support.state.files import flip_bit
from support.state.states import filled
from support.stores.nodes import temporary_store

import dcp_datastates
from dcp_datastates import latest, load, retain, verify
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.errors import (
    CheckpointExistsError,
    ConfigurationError,
    DataStatesError,
    StorageError,
)
from dcp_datastates.storage.object_path import ObjectPath, locate
from dcp_datastates.tiers import carrying, run_identity

STATE = {"w": filled((300_000,), torch.float32, 1), "b": filled((7,), torch.float32, 2)}


@pytest.fixture(params=["directory", "store"])
def either(request, tmp_path, slow):
    return slow if request.param == "store" else str(tmp_path / "slow")


def _save(path, slow, **options):
    return archived_save(STATE, path, slow, reads="immediate", **options)


def _pin(path):
    """As the checkpoint was committed by an earlier process, and not archived."""
    (attempt,) = (each.name for each in path.iterdir() if each.is_dir())
    dcp_datastates.pin(path, f"archive.{attempt}")


def test_a_committed_checkpoint_comes_to_be_in_the_archive(tmp_path, either):
    fast = tmp_path / "fast/step-1"
    handle = _save(fast, either)
    handle.archived.result(30)
    assert verify(f"{either}/step-1").whole
    assert latest([tmp_path / "fast", either]) == [fast, locate(f"{either}/step-1")]
    assert not pins(fast)


def test_without_an_archive_there_is_nothing_to_wait_for(tmp_path):
    handle = dcp_datastates.async_save(STATE, tmp_path / "step-1")
    with pytest.raises(ConfigurationError, match="archive="):
        _ = handle.archived
    handle.result()


def test_a_save_that_fails_is_not_archived(tmp_path, slow, store):
    (tmp_path / "fast").write_text("in the way")
    with pytest.raises((StorageError, ConfigurationError)):
        _save(tmp_path / "fast/step-1", slow).archived.result(30)
    assert not store.objects


def test_a_store_that_is_away_costs_nothing_but_time(tmp_path, slow, store, caplog):
    away = True
    store.on_request = lambda request: Fate.REFUSED if away else Fate.DONE
    handles = [_save(tmp_path / f"fast/step-{step}", slow) for step in (1, 2, 3)]
    for handle in handles:
        handle.result(30)
    assert not any(handle.archived.done() for handle in handles)
    # No retention touches what is not archived, also that of another process.
    retain(tmp_path / "fast", keep=1)
    away = False
    for handle in handles:
        handle.archived.result(30)
    assert all(verify(f"{slow}/step-{step}").whole for step in (1, 2, 3))


def test_a_restart_goes_on_where_the_process_ended(tmp_path, either, store):
    fast = tmp_path / "fast"
    for step in (1, 2):
        save(STATE, fast / f"step-{step}")
        _pin(fast / f"step-{step}")
    save(STATE, fast / "step-3")
    _save(fast / "step-4", either).archived.result(30)
    assert [verify(f"{either}/step-{step}").whole for step in (1, 2, 4)] == [True] * 3
    assert latest(either).name == "step-4"
    assert not (tmp_path / "slow/step-3").exists()
    assert not [key for key in store.objects if "/step-3/" in key]
    assert not any(pins(fast / f"step-{step}") for step in (1, 2, 4))


def test_what_was_damaged_on_the_way_before_a_restart_is_carried_again(tmp_path, either, store):
    save(STATE, tmp_path / "fast/step-1")
    _pin(tmp_path / "fast/step-1")
    (path,) = (tmp_path / "fast/step-1").glob("*/*.safetensors")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1  # and it has its size
    left = locate(f"{either}/step-1") / path.parent.name / path.name
    if either.startswith("mem"):
        store.put(left.key, bytes(data))
    else:
        left.parent.mkdir(parents=True)
        left.write_bytes(data)
    _save(tmp_path / "fast/step-2", either).archived.result(30)
    assert verify(f"{either}/step-1").whole


def test_what_the_end_of_the_process_cuts_off_is_pinned(tmp_path, slow, store):
    store.on_request = lambda request: Fate.REFUSED
    handle = _save(tmp_path / "fast/step-1", slow)
    handle.result(30)
    assert pins(tmp_path / "fast/step-1")
    restart()
    with pytest.raises(dcp_datastates.errors.SaveAbandonedError):
        handle.archived.result(30)
    store.on_request = lambda request: Fate.DONE
    _save(tmp_path / "fast/step-2", slow).archived.result(30)
    assert verify(f"{slow}/step-1").whole


def test_the_rest_of_a_copy_that_no_fast_tier_has_is_removed(tmp_path, either, store):
    fast = tmp_path / "fast"
    save(STATE, fast / "step-1")
    dcp_datastates.copy(fast / "step-1", f"{either}/step-1")
    rest = locate(f"{either}/step-1")
    (attempt,) = (path.name for path in (fast / "step-1").iterdir() if path.is_dir())
    if either.startswith("mem"):
        for key in [key for key in store.objects if key.endswith(("decision", ".metadata"))]:
            del store.objects[key]
    else:
        (rest / ".metadata").unlink()
        (rest / attempt / "decision").unlink()
    shutil.rmtree(fast)
    _save(fast / "step-2", either).archived.result(30)
    assert not [key for key in store.objects if "/step-1/" in key and key.endswith("safetensors")]
    assert not (tmp_path / "slow/step-1" / attempt).exists()


def test_a_step_that_is_saved_again_replaces_the_older_one(tmp_path, either, store):
    _save(tmp_path / "fast/step-1", either).archived.result(30)
    again = {name: tensor + 1 for name, tensor in STATE.items()}
    handle = archived_save(again, tmp_path / "fast/step-1", either)
    handle.archived.result(30)
    loaded = dcp_datastates.load(f"{either}/step-1")
    assert torch.equal(loaded["b"], again["b"])
    files = [key for key in store.objects if key.endswith("safetensors")]
    assert len(files or [*(tmp_path / "slow/step-1").glob("*/*.safetensors")]) == 1


def test_an_older_checkpoint_never_replaces_a_newer_one(tmp_path, either):
    save(STATE, tmp_path / "fast/step-1")
    _pin(tmp_path / "fast/step-1")
    newer = {name: tensor + 1 for name, tensor in STATE.items()}
    save(newer, f"{either}/step-1")
    _save(tmp_path / "fast/step-2", either).archived.result(30)
    assert torch.equal(dcp_datastates.load(f"{either}/step-1")["b"], newer["b"])


def test_a_stock_checkpoint_in_the_archive_stays(tmp_path):
    torch.distributed.checkpoint.save(dict(STATE), checkpoint_id=tmp_path / "slow/step-1")
    with pytest.raises(CheckpointExistsError):
        _save(tmp_path / "fast/step-1", str(tmp_path / "slow")).archived.result(30)


def test_damage_on_the_fast_tier_is_not_archived(tmp_path, slow, store):
    gate = threading.Event()

    def on_request(request):
        gate.wait(30)
        return Fate.DONE

    store.on_request = on_request
    handle = _save(tmp_path / "fast/step-1", slow)
    handle.result(30)
    (path,) = (tmp_path / "fast/step-1").glob("*/*.safetensors")
    flip_bit(path, 5000)
    gate.set()
    with pytest.raises(dcp_datastates.errors.CheckpointCorruptError):
        handle.archived.result(30)
    assert latest(slow) is None


def test_a_rate_holds_the_carrying_back(tmp_path, slow, monkeypatch):
    waited = []
    monkeypatch.setattr(carrying.JointWork, "wait", lambda self, seconds: waited.append(seconds))
    _save(tmp_path / "fast/step-1", slow, rate=1_000_000).archived.result(30)
    assert max(waited) == pytest.approx(1.2, abs=0.3)  # 1.2 MB


# ---- tiers of one run ------------------------------------------------------------------------------


def _save_checked(path, slow):
    """As the manager does it."""
    if run_identity.of_another_run(path.parent, [locate(slow)]) is not None:
        raise run_identity.another_run(path.parent, locate(slow))
    return _save(path, slow)


def test_a_reused_directory_is_of_another_run(tmp_path, slow):
    _save_checked(tmp_path / "fast/step-1", slow).archived.result(30)
    _save_checked(tmp_path / "reused/step-1", f"{slow}/other").archived.result(30)
    restart()
    with pytest.raises(ConfigurationError, match="belongs to run"):
        _save_checked(tmp_path / "reused/step-2", slow).archived.result(30)
    assert latest(slow).name == "step-1"


def test_an_archive_belongs_to_one_of_two_runs_that_begin_at_the_same_time(
    either, tmp_path, monkeypatch
):
    together, one_by_one, make = threading.Barrier(2), threading.Lock(), run_identity._create

    def create(root, identity):
        if root == locate(either):
            together.wait(30)  # neither has found an identity there
        with one_by_one:
            return make(root, identity)

    def begin(name):
        try:
            return run_identity.check_one_run(tmp_path / name, locate(either))
        except ConfigurationError as error:
            return str(error)

    monkeypatch.setattr(run_identity, "_create", create)
    with ThreadPoolExecutor() as threads:
        results = list(threads.map(begin, ("generator", "critic")))
    assert results.count(True) == 1
    assert any("not tiers of one run" in str(each) for each in results)


def test_file_systems_without_links_hold_archives(tmp_path, monkeypatch):
    def refuse(*ends, **_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    slow = [tmp_path / "slow", ObjectPath("ram://b", "run", store=temporary_store("b"))]
    assert [run_identity.check_one_run(tmp_path / "fast", each) for each in slow * 2] == [True] * 4


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_what_is_no_identity_of_a_run_is_refused_immediately(kind, tmp_path):
    there = tmp_path / "slow" / run_identity.IDENTITY_NAME
    there.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(there)
    elif kind == "device":
        there.symlink_to("/dev/zero")
    else:
        there.write_bytes(bytes(1000))
    with raises(DataStatesError, there.name):
        run_identity.check_one_run(tmp_path / "fast", tmp_path / "slow")


def test_a_new_fast_tier_joins_the_run(tmp_path, slow):
    _save_checked(tmp_path / "fast/step-1", slow).archived.result(30)
    load(locate(slow) / "step-1")
    _save_checked(tmp_path / "new-node/step-2", slow).archived.result(30)
    assert latest([tmp_path / "new-node", slow])[0] == tmp_path / "new-node/step-2"


def test_another_run_does_not_share_the_archive(tmp_path, slow):
    """Neither before anything is in the archive, nor later."""
    first = _save_checked(tmp_path / "one/step-1", slow)
    first.archived.result(30)
    with pytest.raises(ConfigurationError, match="belongs to a run that saves elsewhere"):
        _save_checked(tmp_path / "two/step-1", slow).archived.result(30)
    with pytest.raises(ConfigurationError, match="belongs to a run that saves elsewhere"):
        _save_checked(tmp_path / "two/step-2", slow).archived.result(30)
    assert latest(slow).name == "step-1"


def test_checkpoints_of_no_known_run_do_not_join_one(tmp_path, slow):
    _save_checked(tmp_path / "fast/step-1", slow).archived.result(30)
    save(STATE, tmp_path / "reused/step-7")
    with pytest.raises(ConfigurationError, match="does not say of which run"):
        _save_checked(tmp_path / "reused/step-8", slow).archived.result(30)


def test_the_archive_is_another_directory(tmp_path):
    with pytest.raises(ConfigurationError, match="is the directory of the saves"):
        _save_checked(tmp_path / "step-1", str(tmp_path)).archived.result(30)
