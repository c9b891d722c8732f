"""What ``import dcp_datastates`` gives: names, help, types, what objects say of themselves, where errors come from."""

import builtins
import json
import os
import pydoc
import re
import subprocess
import sys
import traceback

import pytest
import torch
from support.commands import ROOT
from support.crashes.failing import armed
from support.state.checkpoints import CACHE
from support.state.files import data_files, flip_bit
from support.state.tracebacks import frames_in
from support.waiting import await_that

import dcp_datastates as ds
from dcp_datastates import results

MOST_MODULES = 135
"""Of the package, that its import brings."""

WHEN_USED = ("checkpoints", "cli", "conversion", "deepspeed", "huggingface", "journal", "lightning")
WHEN_USED += ("manager", "megatron", "monitoring", "sharing", "tiers", "torchtitan", "training")
WHEN_USED += ("weights",)

PUBLIC = [name for name in dir(ds) if not name.startswith("_")]
STATE = {"w": torch.ones(1 << 18), "step": 3}


def test_there_are_thirty_names_at_most_and_the_help_says_what_each_is_for():
    assert 25 < len(PUBLIC) <= 30
    lines = pydoc.plain(pydoc.render_doc(ds)).splitlines()
    assert len(lines) <= 400
    listed = {name for line in lines for name in re.split(r"  +", line.strip())[0].split(", ")}
    assert set(PUBLIC) <= listed


@pytest.mark.parametrize("name", [*PUBLIC, *results.__all__])
def test_each_public_name_is_there_and_has_a_docstring(name):
    assert getattr(ds if name in PUBLIC else results, name).__doc__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lastest'"):
        ds.lastest  # noqa: B018
    assert not hasattr(ds, "__wrapped__")


def test_an_import_brings_what_saves_need():
    code = (
        "import sys, dcp_datastates; print(*(m for m in sys.modules if m.startswith('dcp_datas')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    rooms = {each.split(".")[1] for each in modules if "." in each}
    assert rooms.isdisjoint(WHEN_USED)
    assert len(modules) <= MOST_MODULES


WRONG = {
    'ds.async_save({}, "x", reads="never")': True,
    'ds.save({}, "x", keepp=1)': True,
    'ds.CheckpointManager("x", every=1, max_failures="some")': True,
    "ds.RankLostError": True,
    "ds.errors.RankLostError": False,
    **{f"ds.{name}": False for name in PUBLIC},
}
"""Lines of a program, and whether they are wrong."""


def test_pyright_finds_each_fault_of_a_wrong_program_and_no_other(tmp_path):
    """``make lint`` asks it about the examples."""
    pytest.importorskip("basedpyright", reason="linters are installed with the pinned torch only")
    (tmp_path / "wrong.py").write_text("\n".join(["import dcp_datastates as ds", *WRONG]))
    config = {"extends": f"{ROOT}/pyproject.toml", "include": [str(tmp_path)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(tmp_path)]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    faults = [each for each in found["generalDiagnostics"] if each["severity"] == "error"]
    at = {each["range"]["start"]["line"] for each in faults}
    assert at == {line for line, wrong in enumerate(WRONG.values(), start=1) if wrong}


# --- what objects say of themselves ---------------------------------------------------------------


def _says(thing, *words):
    """Whether the ``repr`` has the kind and the words. It must not touch storage."""

    def refuse(*_, **__):
        raise AssertionError("a repr asks storage")

    with pytest.MonkeyPatch.context() as patch:
        for module, names in ((os, ("open", "stat", "listdir", "scandir")), (builtins, ("open",))):
            for name in names:
                patch.setattr(module, name, refuse)
        said = repr(thing)
    for word in (type(thing).__name__, *words):
        assert word in said
    assert len(said) < 1000


def test_a_save_says_where_it_stands(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(1 << 18))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    ds.track(optimizer)
    manager = ds.CheckpointManager(tmp_path, every=1, reads=3600, host_cache_size=CACHE)
    _says(manager, str(tmp_path), "newest commit: None", "in flight: []")
    first = manager.save(1, {"w": parameter})
    await_that(lambda: "reading" in repr(first), 60)
    _says(first, f"{tmp_path}/step-1")
    _says(manager, "in flight: [SaveHandle(", "step-1', reading")
    first.result(60)
    await_that(lambda: "committed" in repr(first), 60)
    _says(manager, "newest commit: step-1", "in flight: []")
    with armed("publish.link.before@1=error:ENOSPC"):
        second = manager.save(2, {"w": parameter})
        assert second.committed.exception(60) is not None
    await_that(lambda: "failed: " in repr(second), 60)
    _says(manager, "newest commit: step-1", "in flight: []")
    manager.close()
    _says(manager, "closed")


def test_what_serves_saves_and_loads_says_where_it_stands(tmp_path):
    writer, reader = ds.DataStatesWriter(tmp_path / "c"), ds.DataStatesReader(tmp_path / "c")
    _says(writer, f"{tmp_path}/c", "no save yet")
    _says(reader, f"{tmp_path}/c", "opened: None")
    ds.save(STATE, writer=writer)
    await_that(lambda: "committed" in repr(writer), 60)
    torch.distributed.checkpoint.load({"step": 0}, storage_reader=reader, no_dist=True)
    _says(reader, f"opened: {ds.inspect(tmp_path / 'c').attempt}")
    writer.close()
    _says(writer, "closed")
    _says(ds.DataStatesSavePlanner(split_replicas=False), "split_replicas=False")


def test_values_and_results_say_what_they_are(tmp_path):
    layer = torch.nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    _says(ds.Trainable(layer), "Linear", "1 trained parameter")
    _says(ds.PerRank(layer), "Linear")
    _says(ds.RngState())
    _says(ds.Keep(last=3), "last=3")
    _says(ds.AutoInterval(mtbf="6h"), "mtbf='6h'")
    found = []
    stop = ds.on_save(found.append)
    many = {f"layer {number}": torch.ones(3) for number in range(1000)}
    _says(ds.save(many, tmp_path / "a", host_cache_size=CACHE), "written_bytes=")
    ds.save({}, tmp_path / "b", host_cache_size=CACHE)
    await_that(lambda: len(found) == 2, 60)
    stop()
    _says(found[0], f"path='{tmp_path}/a'", "outcome='committed'")
    _says(ds.inspect(tmp_path), "latest='b'")
    _says(ds.inspect(tmp_path / "a"), "committed=True")
    _says(ds.verify(tmp_path / "a"), f"{tmp_path}/a: whole")
    _says(ds.diff(tmp_path / "a", tmp_path / "b"), "1000 names differ")
    _says(ds.convert(tmp_path / "a", tmp_path / "a.pt", "torch"), "target_format='torch'")


# --- where errors come from -------------------------------------------------------------------------


def _failing_save(root):
    with armed("publish.link.before@1=error:ENOSPC"):
        handle = ds.async_save(STATE, root / "step-2", host_cache_size=CACHE)
        assert handle.wait(60)
    return handle


CALLS = {
    "save, committed there": lambda root: ds.save(STATE, root / "step-1", overwrite=False),
    "save, store": lambda root: ds.save(STATE, "nope://bucket/step-1"),
    "result": lambda root: _failing_save(root).result(),
    "the future's result": lambda root: _failing_save(root).committed.result(),
    "load, missing": lambda root: ds.load(root / "new"),
    "load, another state": lambda root: ds.load(root / "step-1", {"w": torch.ones(3)}),
    "load, corrupt": lambda root: ds.load(root / "step-1", {"w": torch.zeros(1 << 18)}),
    "latest, option": lambda root: ds.latest(root, verify="some"),
    "manager's end": lambda root: _full_loop(root),
    "restore_latest, corrupt": lambda root: _manager(root).restore_latest({}),
    "restore, missing": lambda root: _manager(root).restore(7, {}),
    "inspect, missing": lambda root: ds.inspect(root / "new"),
    "verify, missing": lambda root: ds.verify(root / "new"),
    "convert, missing": lambda root: ds.convert(root / "new", root / "other"),
    "convert, corrupt": lambda root: ds.convert(root / "step-1", root / "new", "safetensors"),
    "save, no directory": lambda root: ds.save(STATE, "/proc/x/y"),
    "save, one name": lambda root: ds.save({1: torch.ones(1), "1": torch.ones(1)}, root / "new"),
    "save, sparse": lambda root: ds.save({"w": torch.ones(2).to_sparse()}, root / "new"),
    "Keep": lambda root: ds.Keep(best=("loss", "least")),
}
"""Calls that fail, in a root whose only checkpoint is damaged. ``unit/dcp/test_mistakes.py`` has bad arguments."""


def _manager(root, **options):
    return ds.CheckpointManager(root, every=1, verify="full", host_cache_size=CACHE, **options)


def _full_loop(root):
    with armed("publish.link.before@1=error:ENOSPC"), _manager(root, max_failures=1) as manager:
        manager.save(1, STATE)


@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_the_package_ends_in_the_users_code_within_three_frames(call, tmp_path):
    ds.save(STATE, tmp_path / "step-1", host_cache_size=CACHE)
    flip_bit(data_files(tmp_path / "step-1")[0], 100_000)
    with pytest.raises(ds.errors.DataStatesError) as raised:
        CALLS[call](tmp_path)
    assert 1 <= frames_in(raised.value) <= 3


def test_an_error_of_the_users_code_keeps_its_traceback(tmp_path):
    class Mine:
        def state_dict(self):
            raise KeyError("mine")

        def load_state_dict(self, state):
            pass

    with pytest.raises(KeyError) as raised:
        ds.save({"mine": Mine()}, tmp_path / "c", host_cache_size=CACHE)
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "state_dict"


def test_the_log_has_the_whole_traceback(tmp_path, caplog):
    with caplog.at_level("DEBUG", "dcp_datastates"), pytest.raises(ds.errors.DataStatesError):
        ds.load(tmp_path / "new")
    assert "open_committed" in caplog.text
