"""The rules of ``Keep``, and pins: what ``retain`` leaves, and what no deletion takes."""

import json
import math
import shutil
import time
from dataclasses import replace

import pytest
import torch
from support.commands import run_cli
from support.state.checkpoints import CACHE, raises
from support.state.files import data_files
from support.state.metadata import decision_of
from support.state.roots import committed_names

import dcp_datastates as ds
from dcp_datastates import Keep, delete, inspect, pin, retain, unpin
from dcp_datastates.errors import CheckpointNotFoundError, ConfigurationError, StorageError
from dcp_datastates.format.metadata import decode, encode

LOSSES = {100: 3.0, 200: 1.0, 300: 2.0, 400: 1.5, 500: 4.0}


@pytest.fixture
def run(tmp_path):
    """Checkpoints of steps 100 to 500, with a loss each."""
    for step, loss in LOSSES.items():
        state = {"w": torch.full((100,), float(step))}
        ds.save(state, tmp_path / f"step-{step}", metrics={"loss": loss}, host_cache_size=CACHE)
    return tmp_path


def steps(root):
    return [int(name.removeprefix("step-")) for name in committed_names(root)]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (2, [400, 500]),
        (Keep(last=2), [400, 500]),
        (Keep(every=200), [200, 400, 500]),
        (Keep(best=("loss", "min")), [200, 500]),
        (Keep(best=("loss", "min", 2)), [200, 400, 500]),
        (Keep(best=("loss", "max")), [500]),
        (Keep(last=2, best=("loss", "max", 2)), [100, 400, 500]),
        (Keep(every=300, best=("loss", "min")), [200, 300, 500]),
    ],
    ids=str,
)
def test_what_any_rule_asks_for_stays(keep, left, run):
    deleted = retain(run, keep=keep)
    assert steps(run) == left
    assert len(deleted) == len(LOSSES) - len(left)


def test_a_metric_that_no_checkpoint_has_deletes_nothing(run):
    for keep in (Keep(best=("accuracy", "max")), Keep(last=2, best=("Loss", "min"))):
        with raises(ConfigurationError, keep.best[0], "they have loss", "Nothing was deleted"):
            retain(run, keep=keep)
    assert steps(run) == list(LOSSES)
    ended = run_cli("retain", run, "--keep", "1", "--best", "acc:min")
    assert ended.returncode == 2
    assert "they have loss" in ended.stderr


DAY = 86400


def _set_ages(run, days):
    for name, age in days.items():
        path = decision_of(run / name)
        table = decode(path.read_bytes(), path)
        note = replace(table.note, published_at=time.time() - age * DAY)
        path.write_bytes(encode(replace(table, note=note)))


@pytest.mark.parametrize("ahead", [-30, 30])
def test_within_does_not_rely_on_this_hosts_clock(ahead, run, monkeypatch):
    """A job that pauses looks the same as a clock that is ahead."""
    names = committed_names(run)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead * DAY)
    assert retain(run, keep=Keep(within="7d")) == []
    assert committed_names(run) == names


@pytest.mark.parametrize("age", [-30, 30])
def test_within_deletes_nothing_if_the_times_contradict_the_order(age, run, caplog):
    """The clock was wrong for a while: two months ago for the newest, or in a month for an older one."""
    names = committed_names(run)
    _set_ages(run, dict.fromkeys(names, 20.0) | {names[-1 if age > 0 else 0]: float(age)})
    assert retain(run, keep=Keep(within="7d")) == []
    assert caplog.text.count("contradict their order") == 1


def test_within_keeps_by_this_hosts_clock_if_the_newest_is_of_the_future(run):
    names = committed_names(run)
    _set_ages(run, dict.fromkeys(names, 1.0) | {names[-1]: -30.0})
    assert retain(run, keep=Keep(within="7d")) == []


@pytest.mark.parametrize("copied", [False, True])
def test_within_a_time_since_its_commit_everything_stays(copied, run, tmp_path_factory):
    _set_ages(run, {"step-100": 8.0, "step-200": 8.0})
    root = tmp_path_factory.mktemp("copied") if copied else run
    for path in sorted(run.iterdir(), reverse=True) if copied else ():
        shutil.copytree(path, root / path.name, copy_function=shutil.copyfile)
    retain(root, keep=Keep(within="7d"))
    assert steps(root) == [300, 400, 500]


def test_a_damaged_checkpoint_is_not_the_best(run):
    data_files(run / "step-200")[0].unlink()
    retain(run, keep=Keep(best=("loss", "min")))
    assert steps(run) == [400, 500]


@pytest.mark.parametrize("losses", [(math.nan, 7.0, math.nan), (1.0, 1.0, 2.0)])
def test_the_best_is_a_number_and_of_two_equals_the_newer(losses, tmp_path):
    for step, loss in enumerate(losses, start=1):
        ds.save({"step": step}, tmp_path / f"step-{step}", metrics={"loss": loss})
    retain(tmp_path, keep=Keep(best=("loss", "min")))
    assert steps(tmp_path) == [2, 3]


def test_nothing_is_deleted_before_there_are_as_many_good_ones_as_asked_for(run):
    for step in (200, 300, 400):
        data_files(run / f"step-{step}")[0].unlink()
    assert retain(run, keep=Keep(last=3, every=1000)) == []
    assert steps(run) == sorted(LOSSES)


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ({"last": 0}, "last=0"),
        *(({"last": last}, f"last={last!r}") for last in (-1, 1.0, "2", True)),
        ({"every": 0}, "every=0"),
        ({"within": "soon"}, "within='soon'"),
        ({"within": 0}, "within=0"),
        ({"best": "loss"}, "best='loss'"),
        ({"best": ("loss",)}, "best="),
        ({"best": ("loss", "least")}, "least"),
        ({"best": ("loss", "min", 0)}, "0"),
    ],
    ids=str,
)
def test_a_rule_that_cannot_work_is_refused(rule, name, tmp_path):
    with raises(ConfigurationError, name):
        Keep(**rule)
    if "last" in rule:
        with raises(ConfigurationError, f"keep={rule['last']!r}"):
            retain(tmp_path, keep=rule["last"])


# --- metrics -----------------------------------------------------------------------------------------


def test_metrics_are_in_the_description_and_not_in_the_state(run):
    assert inspect(run / "step-200").metrics == {"loss": 1.0}
    listed = {each.name: each.metrics for each in inspect(run).checkpoints}
    assert listed["step-300"] == {"loss": 2.0}
    assert set(ds.load(run / "step-200")) == {"w"}
    assert "loss 1" in run_cli("inspect", run / "step-200").stdout
    assert "loss 1.5" in run_cli("inspect", run).stdout


def test_each_save_of_a_cached_plan_has_its_own_metrics(tmp_path):
    writer = ds.DataStatesWriter(host_cache_size=CACHE)
    for step in (1, 2, 3):
        state = {"w": torch.full((100,), float(step))}
        handle = ds.async_save(
            state, tmp_path / f"{step}", writer=writer, metrics={"loss": torch.tensor(step / 2)}
        )
        handle.result()
    assert handle.stats.steady, "the plan was not cached: this asks nothing"
    assert [inspect(tmp_path / f"{step}").metrics["loss"] for step in (1, 2, 3)] == [0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    "metrics", [{"loss": "low"}, {"loss": torch.ones(2)}, {1: 1.0}, [1.0]], ids=str
)
def test_metrics_must_be_numbers_by_name(metrics, tmp_path):
    with raises(ConfigurationError, "metrics"):
        ds.async_save({"w": torch.ones(1)}, tmp_path / "1", metrics=metrics)


# --- pins --------------------------------------------------------------------------------------------


def test_what_is_pinned_stays_until_it_is_unpinned(run):
    pin(run / "step-100", "eval")
    pin(run / "step-100")
    assert inspect(run / "step-100").pins == ("eval", "keep")
    retain(run, keep=1)
    assert steps(run) == [100, 500]
    with raises(StorageError, "eval, keep"):
        delete(run / "step-100")
    unpin(run / "step-100", "eval")
    unpin(run / "step-100")
    unpin(run / "step-100")
    retain(run, keep=1)
    assert not (run / "step-100").exists()


def test_a_pin_outlives_a_save_to_the_same_path(run):
    pin(run / "step-100")
    ds.save({"w": torch.ones(1)}, run / "step-100")
    assert inspect(run / "step-100").pins == ("keep",)


def test_only_a_checkpoint_can_be_pinned_and_by_a_plain_name(run):
    with raises(CheckpointNotFoundError, "step-7"):
        pin(run / "step-7")
    for name in ("", "../x", "a b", None):
        with raises(ConfigurationError, "name"):
            pin(run / "step-100", name)


# --- the commands ------------------------------------------------------------------------------------


def test_the_command_takes_the_same_rules(run):
    shown = run_cli(
        "retain", run, "--keep", "1", "--every", "300", "--best", "loss:min", "--json", "--dry-run"
    )
    assert shown.returncode == 0, shown.stderr
    deleted = sorted(json.loads(shown.stdout)["deleted"])
    assert deleted == [str(run / "step-100"), str(run / "step-400")]
    for wrong in (("--best", "loss"), ("--best", "loss:min:x"), ("--within", "soon")):
        ended = run_cli("retain", run, "--keep", "1", *wrong)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "Traceback" not in ended.stderr
    assert steps(run) == sorted(LOSSES)


def test_the_commands_pin_and_unpin(run):
    assert "pinned: eval" in run_cli("pin", run / "step-100", "--name", "eval").stdout
    assert "pinned: eval" in run_cli("inspect", run).stdout
    assert run_cli("delete", "--yes", run / "step-100").returncode == 2
    assert "not pinned" in run_cli("unpin", run / "step-100", "--name", "eval").stdout
    assert run_cli("delete", "--yes", run / "step-100").returncode == 0
