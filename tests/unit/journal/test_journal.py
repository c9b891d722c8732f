"""The journal: a record of each step beside the checkpoints, which survives kills, and which nothing relies on."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.jobs.scripts import environment_of_python
from support.simulated.object_stores import MemoryStore, installed
from support.state.checkpoints import raises
from support.state.loops import Loop, Stateful, manager
from support.state.resumed import train
from support.state.roots import committed_names
from support.tiers import tries
from support.waiting import await_that, lines

import dcp_datastates as ds
from dcp_datastates import Keep, PerRank, RngState
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.journal import journal, state_samples
from dcp_datastates.journal.audit import COMPARED
from dcp_datastates.journal.journal import pack, records_in
from dcp_datastates.journal.state_samples import Record

RECORD = 128


def journals(root):
    return sorted((root / ".datastates-journal").iterdir())


def loop(root, state, steps=range(1, 4), **options):
    options = {"every": 1000, "journal": True, "save_last": False, **options}
    with manager(root, **options) as saves:
        for step in steps:
            saves.save(step, state, {"loss": 1 / step})
    return records_in(journals(root)[-1])


def test_each_step_is_a_record_of_128_bytes(tmp_path):
    found = loop(tmp_path, {"model": torch.nn.Linear(4, 4), "rng": RngState()})
    assert list(found) == [1, 2, 3]
    assert [each.loss for each in found.values()] == [1.0, 1 / 2, 1 / 3]
    assert {each.world for each in found.values()} == {1}
    assert journals(tmp_path)[0].stat().st_size == 3 * RECORD


def test_a_step_that_is_saved_again_by_force_has_one_record(tmp_path):
    with manager(tmp_path, journal=True) as saves:
        saves.save(1, {"w": torch.ones(4)})
        saves.save(1, {"w": torch.ones(4)}, force=True)
    assert journals(tmp_path)[0].stat().st_size == RECORD


def test_it_disturbs_no_look_at_the_checkpoints(tmp_path):
    train(tmp_path, 44)
    assert ds.latest(tmp_path).name == "step-30"
    found = ds.inspect(tmp_path)
    assert [each.name for each in found.checkpoints] == ["step-30", "step-15", "step-0"]
    ds.retain(tmp_path, keep=Keep(last=1))
    assert len(journals(tmp_path)) == 1
    assert committed_names(tmp_path) == ["step-30"]


def test_the_journals_of_the_last_three_runs_stay(tmp_path):
    names = []
    for _ in range(5):
        loop(tmp_path, {"w": torch.ones(4)})
        names.append(journals(tmp_path)[-1].name)
    assert names == sorted(names)
    assert [each.name for each in journals(tmp_path)] == names[-3:]


def test_a_store_is_refused_with_a_way_out(monkeypatch):
    root = str(installed(monkeypatch, MemoryStore()).parent)
    with raises(ConfigurationError, "journal=True needs a directory", f"archive='{root}'"):
        manager(root, journal=True)
    manager(root).close()


@pytest.mark.parametrize("damage", ["cut", "a flipped byte", "a stranger's file", "a pipe", "gone"])
def test_what_is_no_record_is_ignored_with_a_line_in_the_log(damage, tmp_path):
    path = tmp_path / "18ec3e9c7e581f05-0"
    records = [Record(1, step, 0.5, 1, 2, 3, None if step % 2 else 7) for step in range(4)]
    data = b"".join(map(pack, records))
    assert len(data) == 4 * RECORD
    if damage == "a pipe":
        os.mkfifo(path)
    elif damage != "gone":
        flipped = bytearray(data)
        flipped[2 * RECORD + 2] ^= 1
        shown = {"cut": data[:-5], "a flipped byte": flipped, "a stranger's file": b"?" * 5000}
        path.write_bytes(shown[damage])
    with lines() as said:
        found = records_in(path)
    expected = {"cut": records[:3], "a flipped byte": records[:2]}.get(damage, [])
    assert list(found.values()) == expected
    assert any(str(path) in each for each in said)


def test_of_a_long_file_the_newest_records_are_read(tmp_path):
    path = tmp_path / "18ec3e9c7e581f05-0"
    steps = range(40_000)
    path.write_bytes(b"".join(pack(Record(1, step, 0.5, 1, 2, 3, None)) for step in steps))
    found = records_in(path)
    assert max(found) == 39_999
    assert 30_000 < len(found) < 40_000


def test_training_goes_on_where_no_record_can_be_written(tmp_path):
    (tmp_path / ".datastates-journal").write_text("a file")
    with lines(logging.WARNING) as said, manager(tmp_path, journal=True) as saves:
        released = threading.Event()
        saves._journal._worker.post(
            released.wait
        )  # so that all records wait when the first one fails
        for step in range(3):
            saves.save(step, {"w": torch.ones(4)})
        released.set()
    assert committed_names(tmp_path) == ["step-0", "step-1", "step-2"]
    assert len([each for each in said if "the journal ends here" in each]) == 1


def _swapped(model):
    model.weight.data = torch.ones(3, 3)


def _replaced(model):
    model.weight = torch.nn.Parameter(torch.ones(2, 2))


def _removed(model):
    del model.weight


def _freed(model):
    model.weight.untyped_storage().resize_(0)


def _cut(model):
    model.weight.untyped_storage().resize_(64)


def _expanded(model):
    model.weight = torch.nn.Parameter(torch.ones(1).expand(4096))


def _on_meta(model):
    model.to("meta")


@pytest.mark.parametrize(
    "change", [_swapped, _replaced, _removed, _freed, _cut, _expanded, _on_meta]
)
def test_a_program_may_change_its_tensors_between_steps(change, tmp_path):
    model = torch.nn.Linear(64, 64)
    with manager(tmp_path, every=1000, journal=True, save_last=False) as saves:
        saves.save(1, {"model": model})
        change(model)
        saves.save(2, {"model": model})
        saves.save(3, {"model": model})
    found = records_in(journals(tmp_path)[0])
    assert list(found) == [1, 2, 3]
    assert found[1].model != found[2].model


def test_a_difference_of_any_kind_shows_in_its_digest(tmp_path):
    def run(name, change):
        torch.manual_seed(0)
        random.seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        place = Stateful({"place": 1})
        change(model, optimizer, place)
        state = {"model": model, "optimizer": optimizer, "place": PerRank(place)}
        return loop(tmp_path / name, state)[1]

    def moments(model, optimizer, place):
        optimizer.state[model.bias]["exp_avg"][0] += 1

    changes = {
        "model": lambda model, *_: model.bias.data.add_(1),
        "optimizer": moments,
        "loader": lambda _, __, place: place.state.update(place=2),
        "generators": lambda *_: random.random(),
    }
    before = run("before", lambda *_: None)
    assert run("same", lambda *_: None) == before
    for kind, change in changes.items():
        after = run(kind, change)
        differing = [each for each in COMPARED if getattr(after, each) != getattr(before, each)]
        assert differing == [kind]


def test_a_slow_loader_is_asked_now_and_then(tmp_path, monkeypatch):
    class Slow(Stateful):
        asked = 0

        def state_dict(self):
            self.asked += 1
            return super().state_dict()

    clock = SimpleNamespace(perf_counter=itertools.count(0.0, 0.001).__next__)
    monkeypatch.setattr(state_samples, "time", clock)

    slow = Slow({"place": 1})
    found = loop(tmp_path, {"loader": PerRank(slow)}, range(1, 50))
    assert [step for step, each in found.items() if each.loader is not None] == [1, 2, 16, 32, 48]
    assert slow.asked == 5


def test_what_the_program_drops_is_not_held(tmp_path):
    model = torch.nn.Linear(8, 8)
    with manager(tmp_path, every=1000, journal=True, save_last=False) as saves:
        for step in range(1, 6):
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            saves.save(step, {"model": model})
            dropped = weakref.ref(optimizer)
            del optimizer
            gc.collect()
            assert dropped() is None


KILLED = """
import sys
from pathlib import Path
from support.state.resumed import train
train(Path(sys.argv[1]), 100_000, seed=int(sys.argv[2]))
"""


@pytest.mark.parametrize("kills", tries(1, 8, "JOURNAL_KILLS"))
def test_a_run_that_is_killed_at_any_step_is_resumed_and_compared(
    kills, tmp_path, tmp_path_factory
):
    log = tmp_path_factory.mktemp("log") / "log"
    for number in range(kills):
        saved = set(committed_names(tmp_path))
        with log.open("ab") as told:
            process = subprocess.Popen(
                [sys.executable, "-c", KILLED, str(tmp_path), str(number)],
                env=environment_of_python(),
                stderr=told,
            )
        try:
            await_that(lambda: set(committed_names(tmp_path)) - saved)  # noqa: B023
            path = journals(tmp_path)[-1]
            least = path.stat().st_size + random.Random(number).randrange(10) * RECORD
            await_that(lambda: path.stat().st_size > least)  # noqa: B023
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert path.stat().st_size % RECORD == 0
    assert "is not exact" not in log.read_text()
    newest = ds.inspect(tmp_path).newest
    saved = int(newest.name.removeprefix("step-"))
    last = max(records_in(path))
    assert saved <= last
    found = train(tmp_path, last + 20, seed=kills)
    assert (found.after, found.steps, found.step) == (saved, last - saved, None)


def test_of_tensors_of_a_device_some_are_copied_without_a_wait(monkeypatch, tmp_path):
    """On the host, as if its tensors were a device's."""
    copies = []

    class Stream:
        def record_event(self):
            return self

        def synchronize(self):
            copies.append(threading.current_thread())

    def empty(*arguments, pin_memory=False, **options):
        assert pin_memory
        return kept(*arguments, **options)

    kept = torch.empty
    monkeypatch.setattr(state_samples, "_IS_CPU", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch, "empty", empty)
    model = torch.nn.ParameterList(torch.randn(100) for _ in range(40)).bfloat16()
    first = loop(tmp_path / "a", {"model": model}, range(1, 9))
    assert len(copies) == 8
    assert threading.current_thread() not in copies
    assert loop(tmp_path / "b", {"model": model}, range(1, 9)).keys() == first.keys()
    assert {each.model for each in first.values()} == {
        each.model for each in records_in(journals(tmp_path / "b")[0]).values()
    }
    with torch.no_grad():
        model[39].add_(1.0)  # the last of 40, of which 16 have their turn
    changed = loop(tmp_path / "c", {"model": model}, range(1, 9))
    differing = [step for step in first if first[step].model != changed[step].model]
    assert differing == [3, 6]


def test_records_that_are_left_out_are_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_MOST_WAITING", 0)
    loop = Loop()
    with lines() as said, manager(tmp_path, every=100, journal=True, save_last=False) as saves:
        for step in range(1, 4):
            saves.save(step, loop.state)
    assert len([line for line in said if "lacks steps" in line]) == 1
