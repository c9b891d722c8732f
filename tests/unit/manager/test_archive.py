"""A manager with two tiers: what is archived, what stays, and what a restart finds."""

import shutil
import threading

import pytest
import torch
from support.simulated.object_stores import Fate
from support.state.archiving import restart

import dcp_datastates
from dcp_datastates import CheckpointManager, Keep, verify
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.tiers import archive


@pytest.fixture
def away(store):
    """While it is set, the store refuses what is below a checkpoint."""
    away = threading.Event()
    away.set()
    store.on_request = lambda request: (
        Fate.REFUSED if away.is_set() and "step-" in request.key else Fate.DONE
    )
    return away


def _steps_at(fast):
    return sorted(int(path.name[5:]) for path in fast.iterdir() if path.is_dir())


def _run(fast, slow, steps, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": -1}
    with CheckpointManager(fast, every=1, archive=slow, **options) as manager:
        resumed = manager.restore_latest(state)
        for step in steps:
            model(torch.ones(1, 300)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = step
            manager.save(step, state, {"loss": float(step)})
        manager.wait()
        kept = manager.steps()
    return resumed, model.weight.detach().clone(), kept


def _steps_in(store):
    return sorted({int(key.split("/")[1][5:]) for key in store.objects if "/step-" in f"/{key}"})


def test_every_third_is_archived_and_each_tier_keeps_what_it_is_told_to(tmp_path, slow, store):
    _, _, kept = _run(tmp_path, slow, range(10), keep=2, archive_every=3, archive_keep=Keep(last=2))
    assert _steps_at(tmp_path) == [8, 9]
    assert _steps_in(store) == [6, 9]
    assert kept == [6, 8, 9]
    assert verify(f"{slow}/step-6").whole


def test_a_run_goes_on_from_the_archive_if_the_fast_tier_is_lost(tmp_path, slow):
    _, whole, _ = _run(tmp_path / "whole", f"{slow}/whole", range(6))
    _run(tmp_path / "fast", f"{slow}/parts", range(4))
    restart()
    shutil.rmtree(tmp_path / "fast")
    resumed, weights, _ = _run(tmp_path / "fast", f"{slow}/parts", range(4, 6))
    assert resumed == 3
    assert torch.equal(weights, whole)


def test_nothing_is_deleted_that_is_not_archived_yet(tmp_path, slow, store, away):
    torch.manual_seed(0)
    state = {"w": torch.randn(1000)}
    with CheckpointManager(tmp_path, every=1, archive=slow, keep=1) as manager:
        handles = [manager.save(step, state) for step in range(4)]
        for handle in handles:
            handle.result(30)
        manager._saves.wait()  # deletions, too
        assert _steps_at(tmp_path) == [0, 1, 2, 3]
        away.clear()
        manager.wait()
        assert _steps_in(store) == [0, 1, 2, 3]
        manager.save(4, state)
        manager.wait()
        assert _steps_at(tmp_path) == [4]


def test_a_save_that_is_not_archived_says_so(tmp_path, slow):
    with CheckpointManager(tmp_path, every=1, archive=slow, archive_every=2) as manager:
        first, second = (manager.save(step, {"w": torch.ones(3)}) for step in (0, 1))
        first.archived.result(30)
        with pytest.raises(ConfigurationError, match="archive_every"):
            _ = second.archived
        second.result(30)


def test_a_pinned_checkpoint_stays_on_both_tiers(tmp_path, slow, store):
    with CheckpointManager(tmp_path, every=1, archive=slow, keep=1, archive_keep=1) as manager:
        manager.save(0, {"w": torch.ones(3)})
        manager.wait()
        for root in (tmp_path, slow):
            dcp_datastates.pin(f"{root}/step-0")
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(3)})
        manager.wait()
        assert _steps_in(store) == [0, 2]
        for root in (tmp_path, slow):
            dcp_datastates.unpin(f"{root}/step-0")
        manager.save(3, {"w": torch.ones(3)})
        manager.wait()
    assert _steps_in(store) == [3]
    assert _steps_at(tmp_path) == [3]


# ---- a full fast tier ------------------------------------------------------------------------------


class _Disk:
    """A file system with room for some checkpoints: what lies below a directory counts."""

    def __init__(self, root, nbytes):
        self.root, self.nbytes = root, nbytes

    def usage(self, path):
        used = sum(each.stat().st_size for each in self.root.rglob("*.safetensors"))
        return type("Usage", (), {"free": self.nbytes - used})


def test_a_full_fast_tier_gives_up_what_is_archived_and_loses_nothing(
    tmp_path, slow, store, monkeypatch
):
    fast = tmp_path / "fast"
    disk = _Disk(fast, 4_000_000)  # three of 1.2 MB
    monkeypatch.setattr(archive.shutil, "disk_usage", disk.usage)
    most = 0
    state = {"w": torch.randn(300_000), "step": 0}
    with CheckpointManager(fast, every=1, archive=slow) as manager:
        for step in range(8):
            state["step"] = step
            handle = manager.save(step, state)
            handle.result(30)
            manager._saves.deletions.wait()
            most = max(most, disk.nbytes - disk.usage(fast).free)
            assert disk.usage(fast).free >= 0
        manager.wait()
    assert most > 2_000_000
    assert _steps_in(store) == list(range(8))
    assert len(_steps_at(fast)) <= 3
    assert _loaded_step(fast, slow) == 7


def _loaded_step(fast, slow):
    return dcp_datastates.load(dcp_datastates.latest([fast, slow]))["step"]


def test_saves_wait_where_nothing_is_archived_yet(tmp_path, slow, store, away, monkeypatch, caplog):
    fast = tmp_path / "fast"
    disk = _Disk(fast, 4_000_000)
    monkeypatch.setattr(archive.shutil, "disk_usage", disk.usage)
    monkeypatch.setattr(archive, "_LOOK_SECONDS", 0.01)
    state = {"w": torch.randn(300_000)}
    with CheckpointManager(fast, every=1, archive=slow) as manager:
        for step in range(3):
            manager.save(step, state).result(30)
            manager._saves.deletions.wait()
        timer = threading.Timer(0.5, away.clear)
        timer.start()
        manager.save(3, state).result(30)
        assert not away.is_set(), "it waited"
        timer.join()
        manager.wait()
    assert "needs room" in caplog.text
    assert _steps_in(store) == [0, 1, 2, 3]
    assert disk.usage(fast).free >= 0


def test_a_pinned_checkpoint_is_not_evicted(tmp_path, slow, monkeypatch, caplog):
    fast = tmp_path / "fast"
    monkeypatch.setattr(archive.shutil, "disk_usage", _Disk(fast, 3_000_000).usage)
    state = {"w": torch.randn(300_000)}
    with CheckpointManager(fast, every=1, archive=slow) as manager:
        manager.save(0, state).result(30)
        dcp_datastates.pin(manager.path(0))
        for step in (1, 2, 3):
            manager.save(step, state)
            manager.wait()
    assert (fast / "step-0/.metadata").exists()
    assert not (fast / "step-1").exists()


def test_what_was_never_archived_is_not_evicted(tmp_path, slow, monkeypatch, caplog):
    fast = tmp_path / "fast"
    monkeypatch.setattr(archive.shutil, "disk_usage", _Disk(fast, 3_000_000).usage)
    with CheckpointManager(fast, every=1, archive=slow, archive_every=2) as manager:
        for step in range(4):
            manager.save(step, {"w": torch.randn(300_000)})
            manager.wait()
    # For step 2, step 0 went, which is archived. For step 3 nothing could: step 1 is not, and 2 was the newest.
    assert _steps_at(fast) == [1, 2, 3]
    assert "a save needs about" in caplog.text


def _leave_unarchived(fast, slow, steps):
    """As a job leaves them that is killed before its checkpoints are archived."""
    _run(fast, slow, [])  # makes the identities
    restart()
    with CheckpointManager(fast, every=1) as manager:
        for step in steps:
            manager.save(step, {"w": torch.full((1000,), float(step))})
    for step in steps:
        attempt = dcp_datastates.inspect(fast / f"step-{step}").attempt
        dcp_datastates.pin(fast / f"step-{step}", f"archive.{attempt}")


@pytest.mark.parametrize("ends", ["wait", "the process"])
def test_a_restart_without_saves_archives_what_the_job_before_has_left(
    ends, tmp_path, slow, store, monkeypatch
):
    _leave_unarchived(tmp_path / "fast", slow, [1, 2])
    listed = threading.Event()
    pins = archive.pins
    monkeypatch.setattr(archive, "pins", lambda path: listed.wait(30) and pins(path))
    manager = CheckpointManager(tmp_path / "fast", every=1, archive=slow, save_last=False)
    threading.Timer(0.2, listed.set).start()
    if ends == "wait":
        manager.wait()
    else:
        archive._finish_at_end()
    assert _steps_in(store) == [1, 2]
    manager.close()


def test_pins_of_attempts_that_died_go_with_the_archived_one(tmp_path, slow, store):
    fast = tmp_path / "fast"
    (fast / "step-1").mkdir(parents=True)
    (
        fast / "step-1" / "pin.archive.18eb7384dd419f61-00000002"
    ).touch()  # killed before it was committed
    _run(fast, slow, [1])
    assert _steps_in(store) == [1]
    assert not list((fast / "step-1").glob("pin.*"))
