"""``reuse="unchanged"``: what has not changed is linked, what has changed is written, and no change is missed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.crashes.failing import armed
from support.logs import lines
from support.state.checkpoints import CACHE, assert_same, clone, load_everything, raises
from support.state.files import flip_bit
from support.state.reusing import fresh, linked, save_reusing, space, written
from support.tiers import sampled

import dcp_datastates as ds
from dcp_datastates import (
    CheckpointCorruptError,
    ConfigurationError,
    DataStatesSavePlanner,
    SnapshotTornError,
    track,
    verify,
)

MIB = 1 << 20


@pytest.fixture
def state():
    return {"base": fresh(3 * MIB), "adapter": fresh(), "object": {"step": 1}}


def assert_whole(path: Path, expected: dict) -> None:
    assert_same(load_everything(path), expected)
    assert verify(path).whole, str(verify(path))


def test_only_what_has_changed_is_written(state, tmp_path):
    first = save_reusing(state, tmp_path / "1")
    assert not first.bytes_linked
    assert not linked(tmp_path / "1")
    state["adapter"] = fresh()
    second = save_reusing(state, tmp_path / "2")
    assert second.bytes_linked == state["base"].nbytes
    assert second.bytes_written < state["adapter"].nbytes + 12_288  # header, object
    assert os.path.samefile(linked(tmp_path / "2")[0], written(tmp_path / "1")[0])
    assert_whole(tmp_path / "2", state)


def test_without_the_option_all_is_written(state, tmp_path):
    for name in "12":
        stats = ds.save(state, tmp_path / name, host_cache_size=CACHE)
        assert stats.bytes_linked == 0
        assert stats.bytes_written > state["base"].nbytes
        assert not linked(tmp_path / name)


@pytest.mark.parametrize("at", [0, 1, 8 * MIB - 1, 8 * MIB, 17 * MIB, 20 * MIB - 1])
def test_one_bit_is_a_change_wherever_it_is(at, tmp_path):
    state = {"large": fresh(20 * MIB)}
    save_reusing(state, tmp_path / "1")
    state["large"][at] ^= 1
    assert save_reusing(state, tmp_path / "2").bytes_linked == 0
    assert_whole(tmp_path / "2", state)


def _renamed(state):
    return {"other": state["base"], "adapter": state["adapter"]}


def _exchanged(state):
    return {"base": state["twin"], "twin": state["base"]}


def _reshaped(state):
    return {"base": state["base"].reshape(2, -1)}


def _of_another_dtype(state):
    return {"base": state["base"].view(torch.int16)}


def _cut(state):
    return {"base": state["base"][: state["base"].numel() // 2].clone()}


@pytest.mark.parametrize("change", [_renamed, _exchanged, _reshaped, _of_another_dtype, _cut])
def test_equal_bytes_of_another_tensor_do_not_count(change, tmp_path):
    state = {"base": fresh(), "twin": fresh(), "adapter": fresh()}
    save_reusing(state, tmp_path / "1")
    changed = change(state)
    save_reusing(changed, tmp_path / "2")
    assert_whole(tmp_path / "2", changed)
    assert not [name for name in ("base", "other") if name in changed and linked(tmp_path / "2")]


def test_tensors_of_equal_bytes_have_places_of_their_own(tmp_path):
    zeros = torch.zeros(50_000, dtype=torch.uint8)
    state = {"a": zeros, "b": zeros.clone(), "rest": fresh(), "empty": torch.zeros(0, 3)}
    for name in "123":
        save_reusing(state, tmp_path / name)
        assert_whole(tmp_path / name, state)
    assert not written(tmp_path / "3"), "the empty tensor is found again, too"


@pytest.mark.parametrize("planner", [None, DataStatesSavePlanner, dcp.DefaultSavePlanner])
@pytest.mark.parametrize("by", ["async_save", "dcp.save", "dcp.async_save"])
def test_every_way_to_save_links(by, planner, state, tmp_path):
    """In the planners' caches, nothing goes wrong by what is linked in one save and written in the next."""
    for number in range(4):
        if number:
            state["adapter"] = fresh()
        path, made = tmp_path / str(number), planner and planner()
        if by == "async_save":
            options = {"host_cache_size": CACHE, "reuse": "unchanged", "planner": made}
            handle = ds.async_save(state, path, **options)
            handle.result()
            stats = handle.stats
        else:
            writer = ds.DataStatesWriter(path, host_cache_size=CACHE, reuse="unchanged")
            if by == "dcp.save":
                dcp.save(state, storage_writer=writer, planner=made)
            else:
                dcp.async_save(state, storage_writer=writer, planner=made).result()
            stats = writer.last_save
        assert bool(stats.bytes_linked) == bool(number)
        assert_whole(path, state)


@pytest.mark.parametrize("audit", [False, True])
def test_deferred_tensors_are_linked_and_those_that_change_are_torn(audit, tmp_path):
    frozen, trained = (torch.nn.Parameter(fresh(size).float()) for size in (200_000, 50_000))
    optimizer = torch.optim.SGD([frozen, trained], lr=1.0)
    track(optimizer)
    state = {"frozen": frozen, "trained": trained}
    for number in range(3):
        expected = clone(state)
        handle = ds.async_save(
            state, tmp_path / str(number), host_cache_size=CACHE, reuse="unchanged", audit=audit
        )
        trained.grad = torch.ones_like(trained)
        optimizer.step()  # held back until both reads are done
        handle.result()
        assert handle.stats.deferred_bytes
        assert bool(handle.stats.bytes_linked) == bool(number)
        assert_whole(tmp_path / str(number), expected)
    handle = ds.async_save(
        state,
        tmp_path / "torn",
        host_cache_size=CACHE,
        reuse="unchanged",
        read_deadline=30,
    )
    with torch.no_grad():
        frozen.add_(1)  # by no optimizer: nothing holds it back
    with pytest.raises(SnapshotTornError, match="frozen"):
        handle.result()


def test_an_overwritten_checkpoint_is_linked_and_its_rest_goes(state, tmp_path):
    path = tmp_path / "checkpoint"
    for number in range(5):
        state["adapter"] = fresh()
        stats = save_reusing(state, path)
        assert bool(stats.bytes_linked) == bool(number)
        assert_whole(path, state)
    (file,) = linked(path)
    assert file.stat().st_nlink == 1
    assert space(tmp_path) < 4 * MIB


def test_what_was_deleted_or_replaced_is_written_again(state, tmp_path):
    save_reusing(state, tmp_path / "1")
    shutil.rmtree(tmp_path / "1")
    assert save_reusing(state, tmp_path / "2").bytes_linked == 0
    file = written(tmp_path / "2")[0]
    kept = file.with_suffix(".kept")
    file.rename(kept)
    file.write_bytes(b"of another program")
    assert save_reusing(state, tmp_path / "3").bytes_linked == 0
    assert_whole(tmp_path / "3", state)


def test_deletion_of_the_former_checkpoint_leaves_the_later_whole(state, tmp_path):
    for name in "123":
        save_reusing(state, tmp_path / name)
    ds.delete(tmp_path / "1")
    shutil.rmtree(tmp_path / "2")
    assert_whole(tmp_path / "3", state)
    state["adapter"] = fresh()
    assert save_reusing(state, tmp_path / "4").bytes_linked == state["base"].nbytes
    ds.delete(tmp_path / "3")
    assert_whole(tmp_path / "4", state)


@pytest.mark.parametrize("fault", ["vote.before", "publish.write.before"])
@pytest.mark.parametrize("stays", [False, True])
def test_a_failed_save_is_never_linked(fault, stays, state, tmp_path):
    """Also if its files cannot be removed: their bytes may never become durable."""
    save_reusing(state, tmp_path / "1")
    state["base"] = fresh(3 * MIB)
    left = ";cleanup.unlink.before=error:EIO" if stays else ""
    with armed(f"{fault}=error:EIO{left}"), raises(ds.DataStatesError):
        save_reusing(state, tmp_path / "2")
    assert not (tmp_path / "2" / ".metadata").exists()
    assert bool(list((tmp_path / "2").rglob("r0*"))) == stays
    assert save_reusing(state, tmp_path / "3").bytes_linked < MIB
    assert_whole(tmp_path / "3", state)


@pytest.mark.parametrize("error", sampled(["EXDEV", "EPERM", "EMLINK", "EIO"], keep=["EXDEV"]))
@pytest.mark.parametrize("when", ["before", "after"])
def test_where_links_fail_all_is_written(error, when, state, tmp_path):
    save_reusing(state, tmp_path / "1")
    with armed(f"reuse.link.{when}=error:{error}"), lines() as said:
        stats = save_reusing(state, tmp_path / "2")
    assert stats.bytes_linked == 0
    assert sum("cannot be linked" in line for line in said) == 1
    assert_whole(tmp_path / "2", state)


def test_a_flipped_bit_in_a_linked_file_is_seen(state, tmp_path):
    for name in "12":
        save_reusing(state, tmp_path / name)
    (file,) = linked(tmp_path / "2")
    flip_bit(file, 2 * MIB)
    with raises(CheckpointCorruptError, "base"):
        load_everything(tmp_path / "2")
    report = verify(tmp_path / "2")
    assert not report.whole
    assert {name for damage in report.damages for name in damage.tensors} == {"base"}


def test_a_linked_header_that_does_not_fit_is_seen(state, tmp_path):
    """The metadata of one checkpoint with a file of the other: their checksums are right."""
    other = {**state, "base": fresh(3 * MIB), "more": fresh()}
    save_reusing(state, tmp_path / "1")
    state["adapter"] = fresh()
    save_reusing(state, tmp_path / "2")
    save_reusing(other, tmp_path / "3")
    assert verify(tmp_path / "2").whole
    (file,) = linked(tmp_path / "2")
    file.unlink()
    shutil.copy(written(tmp_path / "3")[0], file)
    assert not verify(tmp_path / "2").whole


def test_stock_readers_of_the_directory_never_see_former_values(state, tmp_path):
    save_reusing(state, tmp_path / "1")
    former, state["adapter"] = state["adapter"], fresh()
    save_reusing(state, tmp_path / "2")
    reader = dcp.HuggingFaceStorageReader(str(written(tmp_path / "2")[0].parent))
    found = {"adapter": torch.zeros_like(former)}
    dcp.load(found, storage_reader=reader)
    assert torch.equal(found["adapter"], state["adapter"])
    assert "base" not in reader.read_metadata().state_dict_metadata


def test_a_copied_and_a_converted_checkpoint_have_all_bytes(state, tmp_path):
    for name in "12":
        state["adapter"] = fresh()
        save_reusing(state, tmp_path / name)
    ds.copy(tmp_path / "2", tmp_path / "copy")
    ds.convert(tmp_path / "2", tmp_path / "converted", to="datastates")
    for name in "12":
        shutil.rmtree(tmp_path / name)
    assert_whole(tmp_path / "copy", state)
    assert_whole(tmp_path / "converted", state)


@pytest.mark.parametrize("saves", sampled([40, 120], keep=[40]))
def test_space_and_files_are_bounded_over_many_saves(saves, tmp_path):
    """Another tensor changes in each save; then none is as it was."""
    path = tmp_path / "checkpoint"
    state = {f"w{number}": fresh(20_000) for number in range(40)}
    whole = sum(each.nbytes for each in state.values())
    for number in range(saves):
        state[f"w{7 * number % 40}"] = fresh(20_000)
        save_reusing(state, path)
        assert space(path) <= 2 * whole + 200_000
        assert len(linked(path)) <= 16
    assert_whole(path, state)


def test_an_object_store_is_refused(tmp_path):
    for path in ("memory://bucket/run", "ram://run/1"):
        with raises(ConfigurationError, "links"):
            ds.save({"a": fresh()}, path, reuse="unchanged", host_cache_size=CACHE)
    with raises(ConfigurationError, "'unchangd'", "'none', 'unchanged'"):
        ds.save({"a": fresh()}, tmp_path / "1", reuse="unchangd")


def test_two_states_in_turn_are_both_linked(tmp_path):
    model = {"w": fresh(MIB)}
    average = {"w": fresh(MIB)}
    for number in range(3):
        for name, state in (("model", model), ("average", average)):
            stats = save_reusing(state, tmp_path / f"{name}-{number}")
            assert bool(stats.bytes_linked) == bool(number)
            assert_whole(tmp_path / f"{name}-{number}", state)


def test_an_archive_gets_all_bytes(state, tmp_path):
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    for name in "12":
        handle = ds.async_save(
            state, fast / name, host_cache_size=CACHE, reuse="unchanged", archive=slow
        )
        handle.result()
        handle.archived.result(60)
    assert linked(fast / "2")
    shutil.rmtree(fast)
    for name in "12":
        assert_whole(slow / name, state)


def test_a_manager_links_what_it_keeps(tmp_path):
    model, frozen = torch.nn.Linear(200, 200), torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "frozen": frozen, "optimizer": optimizer}
    options = {"host_cache_size": CACHE, "reuse": "unchanged"}
    with ds.CheckpointManager(tmp_path, every=1, keep=2, **options) as manager:
        for step in range(5):
            model(torch.ones(3, 200)).sum().backward()
            optimizer.step()
            handle = manager.save(step, state)
            assert handle is not None
            handle.result()
            assert bool(handle.stats.bytes_linked) == bool(step)
    assert len(list(tmp_path.glob("*/.metadata"))) == 2
    for path in tmp_path.glob("step-*"):
        assert verify(path).whole
    assert space(tmp_path) < 3 * sum(p.nbytes for p in frozen.parameters())


def _written_so_far() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["write_bytes"])


@pytest.mark.parametrize("tensor_bytes", sampled([MIB, 8 * MIB], keep=[MIB]))
def test_one_percent_trained_is_what_is_written(tensor_bytes, tmp_path):
    """By the kernel's count of what this process has written to storage."""
    state = {f"layer{number}.weight": fresh(tensor_bytes) for number in range(100)}
    for number in range(4):
        state[f"layer{number}.weight"] += 1
        before = _written_so_far()
        save_reusing(state, tmp_path / str(number))
        nbytes = _written_so_far() - before
        if not nbytes:
            pytest.skip("the file system is in memory")
        metadata = sum(
            file.stat().st_size
            for file in (tmp_path / str(number) / ".metadata", *written(tmp_path / str(number)))
        )
        metadata -= 100 * tensor_bytes if number == 0 else tensor_bytes
        changed = tensor_bytes if number else 100 * tensor_bytes
        assert nbytes <= 1.05 * (changed + metadata), (nbytes, changed, metadata)
        assert nbytes >= changed
        print(f"save {number}: {nbytes} bytes written, {changed} changed, {metadata} metadata")
    assert_whole(tmp_path / "3", state)
