"""A loop's weights are published from each commit: whole versions, equal to what was saved, or none."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import Future
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support.crashes.failing import armed
from support.jobs.scripts import run_program
from support.simulated.object_stores import installed
from support.state.loops import Loop, manager
from support.waiting import await_that, lines

from dcp_datastates import Keep, Weights, follow
from dcp_datastates.conversion.source import Source
from dcp_datastates.errors import CheckpointSupersededError, ConfigurationError
from dcp_datastates.ranks.rank_set import ALONE
from dcp_datastates.storage import failpoints
from dcp_datastates.weights import publish, share, version


def _run(root, steps, weights, **options):
    """Saves each of ``steps``; returns what the models held then, by step."""
    loop, held = Loop(), {}
    with manager(root / "run", fresh="replace", publish=weights, **options) as saves:
        for step in steps:
            loop.step()
            held[step] = {name: each.clone() for name, each in loop.model.state_dict().items()}
            saves.save(step, loop.state)
            saves.wait()
    return held


def _found(weights):
    return {each.step: each.read() for each in follow(weights, timeout=0)}


def _assert_equal(found, held):
    assert found.keys() == held.keys()
    for name, tensor in held.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


@pytest.fixture(params=["directory", "store"])
def weights(request, tmp_path):
    if request.param == "directory":
        return str(tmp_path / "weights")
    return request.getfixturevalue("s3_root")


def test_each_commit_becomes_a_version_with_the_values_at_its_call(tmp_path, weights):
    held = _run(tmp_path, range(3), Weights(weights))
    found = _found(weights)
    assert found.keys() == held.keys()
    for step, tensors in held.items():
        _assert_equal(found[step], tensors)


@pytest.mark.parametrize("world", [1, 2, 8, 64])
def test_as_many_ranks_write_as_there_are_and_about_as_much_each(world, tmp_path):
    """Though the embedding is much larger than a rank's part of the rest."""
    sizes = [1 << 20, *[1 << 14, 1 << 16] * 240]
    tensors = {f"w{n}": torch.empty(size, device="meta") for n, size in enumerate(sizes)}
    source = Source(tmp_path, "", tensors, {}, {})
    files = publish._files(source, world)
    assert [*chain.from_iterable(files.values())] == list(tensors)
    taken = [sum(tensors[name].nbytes for name in names) for names in files.values()]
    assert len(files) >= 0.9 * world
    assert max(taken) <= max(source.nbytes / world, tensors["w0"].nbytes) + (1 << 19)


@pytest.mark.parametrize("numbers", [[4, 5, 6, 7, 8], [4, 6, 7, 8]])
def test_a_call_that_fails_on_one_rank_alone_shifts_no_turn(numbers, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(publish.Publisher, "_add", lambda _, save: asked.append(save.number))
    publisher = publish.Publisher(Weights(tmp_path / "w", every=2), ALONE, lambda: None)
    for number in numbers:
        publisher.follow(save := SimpleNamespace(number=number, committed=Future()))
        save.committed.set_result(None)
    publisher.close()
    assert asked == [4, 6, 8]


def test_names_dtype_and_small_files(tmp_path):
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text('{"a": 1}')
    (config / "pytorch_model.bin").write_bytes(b"old weights")
    rules = Weights(
        tmp_path / "w", dtype="bf16", names=lambda name: f"net.{name}", config_from=config
    )
    held = _run(tmp_path, [7], rules)[7]
    folder = tmp_path / "w" / "weight_v000001"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["version"] == "000001"
    assert index["metadata"]["step"] == "7"
    assert index["metadata"]["total_size"] == 2 * sum(each.numel() for each in held.values())
    assert {each.name for each in folder.glob("*.json")} == {
        "config.json",
        "model.safetensors.index.json",
    }
    stored = {
        name: each
        for file in set(index["weight_map"].values())
        for name, each in load_file(folder / file).items()
    }
    assert {each.dtype for each in stored.values()} == {torch.bfloat16}
    _assert_equal(stored, {f"net.{name}": each for name, each in held.items()})


def test_every_n_th_save_and_the_newest_versions_stay(tmp_path):
    held = _run(tmp_path, range(7), Weights(tmp_path / "w", every=2, keep=2))
    found = _found(tmp_path / "w")
    assert list(found) == [4, 6]
    _assert_equal(found[6], held[6])
    assert version.numbers_below(tmp_path / "w") == [3, 4]


def test_a_failed_save_publishes_nothing(tmp_path):
    loop = Loop()
    with manager(tmp_path / "run", publish=Weights(tmp_path / "w"), max_failures=None) as saves:
        loop.step()
        with armed("publish.decide.before=error:EROFS"):
            saves.save(0, loop.state)
            saves.wait()
        loop.step()
        saves.save(1, loop.state)
    assert list(_found(tmp_path / "w")) == [1]


@pytest.mark.parametrize("place", ["write", "publish"])
def test_where_publishing_fails_the_loop_goes_on_and_the_next_version_is_whole(place, tmp_path):
    with lines() as said, armed(f"weights.{place}.before@1=error:ENOSPC"):
        held = _run(tmp_path, range(2), Weights(tmp_path / "w"))
    assert list(_found(tmp_path / "w")) == [1]
    _assert_equal(_found(tmp_path / "w")[1], held[1])
    assert version.numbers_below(tmp_path / "w") == [2]  # the rest of the other is gone
    (told,) = [line for line in said if "step-0 are not published" in line]
    assert "No space left" in told


def test_a_checkpoint_stays_until_its_weights_are_read(tmp_path, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()
    whole = share.Share.write

    def slow(self, *given):
        entered.set()
        assert go_on.wait(60)
        return whole(self, *given)

    monkeypatch.setattr(share.Share, "write", slow)
    loop = Loop()
    run = tmp_path / "run"
    with manager(run, publish=Weights(tmp_path / "w"), keep=Keep(last=1)) as saves:
        for step in range(4):
            loop.step()
            saves.save(step, loop.state).result()
            assert entered.wait(60)
        await_that(lambda: not (run / "step-1").exists())
        assert (run / "step-0").exists()
        go_on.set()
    # Those that came while the first was written are left out, but for the newest.
    assert list(_found(tmp_path / "w")) == [0, 3]
    assert [each.name for each in run.glob("step-*")] == ["step-3"]


def test_a_version_that_was_withdrawn_is_published_no_more(tmp_path):
    number = version.claim(tmp_path)
    version.remove(tmp_path, [number])
    (tmp_path / "weight_v000001").mkdir()
    (tmp_path / "weight_v000001" / "model.safetensors.index.json").write_bytes(version._WITHDRAWN)
    with pytest.raises(CheckpointSupersededError, match="was withdrawn"):
        version.publish(tmp_path, number, {"weight_map": {}}, {})
    assert version.index_of(tmp_path, number) is None


def test_jobs_claim_different_versions(store, monkeypatch):
    root = installed(monkeypatch, store, "w")
    assert [version.claim(root) for _ in range(3)] == [1, 2, 3]
    index = {"metadata": {}, "weight_map": {}}
    version.publish(root, 2, index, {})
    assert version.index_of(root, 2).file_of == {}
    version.remove(root, [1, 2])
    assert version.numbers_below(root) == [3]


_KILLED = """
import sys
from support.state.loops import Loop, manager
from dcp_datastates import Weights
loop = Loop()
with manager(sys.argv[1] + "/run", publish=Weights(sys.argv[1] + "/w")) as saves:
    for step in range(3):
        loop.step()
        saves.save(step, loop.state)
        saves.wait()
"""


@pytest.mark.parametrize(
    ("place", "seen"),
    [
        ("write.before@2", [0]),
        ("write.after@2", [0]),
        ("publish.before@2", [0]),
        ("publish.after@2", [0, 1]),
    ],
)
def test_a_killed_job_leaves_whole_versions_and_the_next_one_goes_on(place, seen, tmp_path):
    armed_there = {failpoints.VARIABLE: f"weights.{place}=kill"}
    killed = run_program(_KILLED, tmp_path, [str(tmp_path)], **armed_there)
    assert killed.returncode == -signal.SIGKILL, killed
    assert list(_found(tmp_path / "w")) == seen
    held = _run(tmp_path, [9], Weights(tmp_path / "w", keep=None))
    found = _found(tmp_path / "w")
    assert list(found) == [*seen, 9]
    _assert_equal(found[9], held[9])
    assert len(version.numbers_below(tmp_path / "w")) == len(found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every"),
        ({"keep": 0}, "keep"),
        ({"config_from": "/nowhere"}, "config_from"),
        ({"names": 7}, "rename"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_an_option_that_cannot_work_is_refused(options, said, tmp_path):
    with pytest.raises(ConfigurationError, match=said):
        Weights(tmp_path, **options)


def test_credentials_are_not_shown():
    shown = repr(Weights("s3://bucket/w", storage_options={"key": "sesame"}))
    assert "s3://bucket/w" in shown
    assert "sesame" not in shown


def test_a_part_that_the_state_lacks_is_an_error_of_the_next_save(tmp_path):
    loop = Loop()
    with manager(tmp_path / "run", publish=Weights(tmp_path / "w", part="modle")) as saves:
        saves.save(0, loop.state)
        saves.wait()
        with pytest.raises(Exception, match="modle"):
            saves.save(1, loop.state)
