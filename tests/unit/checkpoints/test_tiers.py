"""A checkpoint in several tiers: the newest that is whole over all of them, read from the nearest good copies."""

import itertools
import json
import shutil

import pytest
import torch
from support.commands import run_cli
from support.state.checkpoints import assert_same, save
from support.state.files import data_files, flip_bit
from support.state.metadata import decision_of
from support.state.states import filled

import dcp_datastates
from dcp_datastates import latest, load
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError
from dcp_datastates.storage.object_path import locate


def _state(seed):
    return {"w": filled((300_000,), torch.float32, seed), "b": filled((7,), torch.float32, seed)}


@pytest.fixture
def tiers(tmp_path, slow):
    """A fast tier and a slow one, each with two checkpoints; the fast one has a third."""
    for step in (1, 2, 3):
        save(_state(step), tmp_path / f"step-{step}")
    for step in (1, 2):
        dcp_datastates.copy(tmp_path / f"step-{step}", f"{slow}/step-{step}")
    return [tmp_path, slow]


def _loaded(places):
    state = {name: torch.zeros_like(tensor) for name, tensor in _state(0).items()}
    load(places, state)
    return state


def test_the_newest_of_all_tiers_is_found_with_all_its_places(tiers):
    fast, slow = tiers
    assert latest(tiers) == [fast / "step-3"]
    shutil.rmtree(fast / "step-3")
    assert latest(tiers) == [fast / "step-2", locate(f"{slow}/step-2")]
    assert latest([slow, fast]) == [locate(f"{slow}/step-2"), fast / "step-2"]
    shutil.rmtree(fast)
    assert latest(tiers) == [locate(f"{slow}/step-2")]
    assert latest([fast]) is None


def test_a_list_of_no_tiers_is_refused():
    with pytest.raises(ConfigurationError, match="no place"):
        latest([])


def test_the_fast_tier_alone_is_read_while_it_is_whole(tiers, store):
    fast, _ = tiers
    shutil.rmtree(fast / "step-3")
    store.counts.clear()
    assert_same(_loaded(latest(tiers)), _state(2))
    assert store.counts["get_range"] == 0


@pytest.mark.parametrize("verify", ["structure", "full"])
@pytest.mark.parametrize("damage", ["missing", "short", "flipped", "metadata"])
def test_a_damaged_file_is_read_from_the_next_tier(tiers, caplog, verify, damage):
    fast, _ = tiers
    shutil.rmtree(fast / "step-3")
    (path,) = data_files(fast / "step-2")
    match damage:
        case "missing":
            path.unlink()
        case "short":
            path.write_bytes(path.read_bytes()[:-8])
        case "flipped":
            flip_bit(path, 5000)
        case "metadata":
            decision = decision_of(fast / "step-2")
            flip_bit(decision, decision.stat().st_size - 20)
    places = latest(tiers, verify=verify)
    assert len(places) == 2
    assert_same(_loaded(places), _state(2))
    assert "reading the copy in" in caplog.text or "looking at the next place" in caplog.text


def test_a_tier_with_another_checkpoint_of_that_name_is_never_mixed_in(tmp_path):
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    save(_state(1), fast / "step-1")
    save(_state(2), slow / "step-1")
    flip_bit(data_files(fast / "step-1")[0], 5000)
    with pytest.raises(CheckpointCorruptError):
        _loaded([fast / "step-1", slow / "step-1"])


def test_latest_agrees_with_a_search_of_all_damages(tmp_path):
    """Every combination of files missing in two tiers."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    for step in (1, 2):
        save(_state(step), fast / f"step-{step}")
        dcp_datastates.copy(fast / f"step-{step}", slow / f"step-{step}")
    files = {
        (tier, step): data_files(tier / f"step-{step}")[0]
        for tier in (fast, slow)
        for step in (1, 2)
    }
    for gone in itertools.product([False, True], repeat=len(files)):
        moved = [path for path, is_gone in zip(files.values(), gone, strict=True) if is_gone]
        for path in moved:
            path.rename(path.with_suffix(".gone"))
        missing = dict(zip(files, gone, strict=True))
        whole = [step for step in (1, 2) if not (missing[fast, step] and missing[slow, step])]
        if whole:
            found = latest([fast, slow])
            assert int(found[0].name[-1]) == max(whole)
            assert_same(_loaded(found), _state(max(whole)))
        else:
            with pytest.raises(CheckpointCorruptError):
                latest([fast, slow])
        for path in moved:
            path.with_suffix(".gone").rename(path)


def test_the_command_prints_all_places(tiers):
    fast, _ = tiers
    other = fast.with_name(f"{fast.name}-other")
    places = [str(fast / "step-3"), str(other / "step-3")]
    dcp_datastates.copy(*places)
    assert run_cli("latest", fast, other).stdout.splitlines() == places
    answer = json.loads(run_cli("latest", "--json", fast, other).stdout)
    assert (answer["step"], answer["places"]) == (3, places)
    assert run_cli("latest", fast.with_name("none"), other).stdout.splitlines() == places[1:]
