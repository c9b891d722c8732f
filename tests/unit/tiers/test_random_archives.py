"""Random lives of a run with an archive: saves, restarts, deletions, a store that fails, loses answers, and is away."""

import random
import threading

import pytest
import torch
from support.simulated.object_stores import Fate, MemoryStore, installed
from support.state.archiving import archived_save, restart
from support.tiers import tries

from dcp_datastates import latest, load, retain, verify
from dcp_datastates.checkpoints.listing import checkpoints
from dcp_datastates.tiers import archive, carrying


def _state(step):
    return {"w": torch.full((3000,), float(step)), "step": torch.tensor(step)}


class _Life:
    """One run. What it has been promised is kept apart, by steps."""

    def __init__(self, seed, fast, store, slow):
        self.chance = random.Random(seed)
        self.fast, self.store, self.slow = fast, store, slow
        self.step = 0
        self.committed = set()
        self.archived = set()
        self.handles = {}
        self.rate = 0.0
        store.on_request = self.fate

    def fate(self, request):
        if threading.current_thread().name != "dcp_datastates-archive":
            return Fate.DONE  # the test's own
        if self.chance.random() >= self.rate:
            return Fate.DONE
        return self.chance.choice([Fate.REFUSED, Fate.LOST])

    def act(self):
        self.chance.choice(
            [self.save, self.save, self.save, self.restart, self.retain, self.weather]
        )()

    def save(self):
        if self.chance.random() < 0.8 or not self.step:
            self.step += 1  # else again, as after going back
        handle = archived_save(_state(self.step), self.fast / f"step-{self.step}", self.slow)
        handle.result(30)
        self.committed.add(self.step)
        self.archived.discard(self.step)  # the newest of that number may not be, yet
        self.handles[self.step] = handle

    def note(self):
        for step, handle in list(self.handles.items()):
            if handle.archived.done():
                if handle.archived.exception() is None:
                    self.archived.add(step)
                del self.handles[step]

    def restart(self):
        restart()
        self.note()
        self.handles.clear()

    def retain(self):
        before = {path.name for path in checkpoints(self.fast)}
        retain(self.fast, keep=1)
        for name in before - {path.name for path in checkpoints(self.fast)}:
            assert verify(f"{self.slow}/{name}").whole, "it is nowhere else"

    def weather(self):
        self.rate = self.chance.choice([0.0, 0.2, 0.6, 1.0])

    def check(self):
        self.note()
        if not self.committed:
            return
        places = latest([self.fast, self.slow])
        found = load(places)
        newest = max(self.committed)
        assert int(found["step"]) == newest
        assert torch.equal(found["w"], _state(newest)["w"])
        for step in self.archived:
            assert verify(f"{self.slow}/step-{step}").whole

    def end(self):
        """In fair weather, after a restart, all is archived that was committed with an archive, and pinned."""
        self.rate = 0.0
        self.restart()
        on_fast = {int(path.name[5:]) for path in checkpoints(self.fast)}
        self.step += 1
        handle = archived_save(_state(self.step), self.fast / f"step-{self.step}", self.slow)
        handle.archived.result(30)
        for step in {*on_fast, *self.archived, self.step}:
            assert verify(f"{self.slow}/step-{step}").whole, step
            assert int(load(f"{self.slow}/step-{step}")["step"]) == step
        assert not [
            key for key in self.store.objects if "/step-" in key and _attempts(key, self.store) > 1
        ]


def _attempts(key, store):
    """How many attempts have data at the checkpoint of ``key``."""
    prefix = key[: key.index("/step-") + 1] + key[key.index("/step-") + 1 :].split("/")[0] + "/"
    return len(
        {
            each[len(prefix) :].split("/")[0]
            for each in store.objects
            if each.startswith(prefix) and each.endswith(".safetensors")
        }
    )


@pytest.mark.parametrize("lives", tries(12, 60, "ARCHIVE_LIVES"))
def test_nothing_is_lost_whatever_happens(lives, tmp_path, monkeypatch):
    monkeypatch.setattr(carrying, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(carrying, "_LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(archive, "_CLOSE_SECONDS", 5.0)
    for seed in range(lives):
        store = MemoryStore()
        with monkeypatch.context() as patch:
            slow = str(installed(patch, store).parent)
            life = _Life(seed, tmp_path / f"life{seed}", store, slow)
            try:
                for _ in range(life.chance.randrange(3, 14)):
                    life.act()
                    life.check()
                life.end()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            finally:
                life.rate = 0.0
                life.restart()
