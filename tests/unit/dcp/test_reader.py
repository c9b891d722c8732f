"""What a load takes from a checkpoint: all of it, part of it, or all without a template."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.state.checkpoints import (
    assert_same,
    committed,
    load,
    load_everything,
    raises,
    save,
    zeros,
)
from support.state.files import data_files
from support.state.metadata import decision_of
from support.state.states import filled
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dcp_datastates
from dcp_datastates import DataStatesReader
from dcp_datastates.dcp import reader
from dcp_datastates.dcp.reader import reads_of
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    IncompatibleStateError,
)
from dcp_datastates.io.reads import Reads
from dcp_datastates.io.restore import Restore


def test_a_planner_that_allows_partial_loads_skips_what_was_not_saved(tmp_path):
    save({"present": torch.ones(2)}, tmp_path)
    target = {"present": torch.zeros(2), "absent": torch.full((2,), 7.0)}
    load(target, tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert_same(target, {"present": torch.ones(2), "absent": torch.full((2,), 7.0)})


def test_one_reader_serves_several_loads_also_from_several_threads(tmp_path):
    state = {f"t{n}": filled((200_000,), torch.float32, n) for n in range(8)}
    save(state, tmp_path)
    reader = DataStatesReader(tmp_path)
    for _ in range(2):
        target = zeros(state)
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert_same(target, state)
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda _: load_everything(tmp_path), range(8)):
            assert_same(found, state)


@pytest.mark.parametrize("by_id", [False, True])
def test_a_reader_that_keeps_its_metadata_serves_several_loads(by_id, tmp_path):
    class Keeping(DataStatesReader):
        kept = None

        def read_metadata(self, *args, **kwargs):
            self.kept = self.kept or super().read_metadata(*args, **kwargs)
            return self.kept

    save({"w": torch.ones(3)}, tmp_path)
    reader, place = Keeping(tmp_path), {"checkpoint_id": tmp_path} if by_id else {}
    for _ in range(2):
        target = {"w": torch.zeros(3)}
        dcp.load(target, storage_reader=reader, no_dist=True, **place)
        assert_same(target, {"w": torch.ones(3)})


def test_checkpoint_id_overrides_the_readers_path(tmp_path):
    for number in (1, 2):
        save({"n": torch.tensor(number)}, tmp_path / str(number))
    reader = DataStatesReader(tmp_path / "1")
    for number in (2, 1):
        target = {"n": torch.tensor(0)}
        dcp.load(target, checkpoint_id=tmp_path / str(number), storage_reader=reader, no_dist=True)
        assert target["n"].item() == number


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 7), (7, 5), (28,), (4, 7, 1), (), (5, 8)])
def test_another_shape_is_refused_by_name_and_nothing_is_written(shape, tmp_path):
    save({"layer.weight": torch.ones(5, 7)}, tmp_path)
    target = {"layer.weight": torch.full(shape, 3.0)}
    with raises((IncompatibleStateError, ValueError), "layer.weight"):
        load(target, tmp_path)
    assert bool((target["layer.weight"] == 3).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool])
def test_another_dtype_is_refused_by_name_with_the_way_out(dtype, tmp_path):
    save({"layer.weight": torch.ones(5, 7)}, tmp_path)
    target = {"layer.weight": torch.zeros(5, 7, dtype=dtype)}
    with raises(IncompatibleStateError, "layer.weight", "float32", str(dtype), "cast"):
        load(target, tmp_path)
    assert not target["layer.weight"].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_dtype_is_cast_when_asked_for(dtype, tmp_path):
    saved = torch.randn(300, 1000)
    save({"w": saved}, tmp_path)
    target = load({"w": torch.zeros(300, 1000, dtype=dtype)}, tmp_path, cast=True)
    assert_same(target, {"w": saved.to(dtype)})


# --- nothing to load --------------------------------------------------------------------------------


def test_loading_an_uncommitted_save_says_that_it_was_not_committed(tmp_path):
    save({"w": torch.ones(1)}, tmp_path)
    decision_of(tmp_path).unlink()
    assert not committed(tmp_path)
    with raises(CheckpointNotFoundError, str(tmp_path), "commit"):
        load({"w": torch.zeros(1)}, tmp_path)


def test_a_checkpoint_that_is_removed_while_it_is_loaded(tmp_path, monkeypatch):
    """retain, of another process: nothing is corrupt."""
    save({"a": torch.ones(3)}, tmp_path / "c")
    real = Restore.read

    def remove_first(*arguments):
        dcp_datastates.delete(tmp_path / "c")
        return real(*arguments)

    monkeypatch.setattr(Restore, "read", remove_first)
    with raises(CheckpointReplacedError, "was removed meanwhile"):
        load({"a": torch.zeros(3)}, tmp_path / "c")


@pytest.mark.parametrize("share_reads", [None, True])
def test_what_a_rank_alone_reads_is_worked_out_once(share_reads, tmp_path, monkeypatch):
    save({"w": torch.ones(3)}, tmp_path / "c")
    made = []
    monkeypatch.setattr(reader, "reads_of", lambda *of: made.append(1) or reads_of(*of))
    load(state := {"w": torch.zeros(3)}, tmp_path / "c", share_reads=share_reads)
    assert torch.equal(state["w"], torch.ones(3))
    assert len(made) == 1


def test_a_planner_that_gives_a_tensor_of_another_shape_is_refused(tmp_path):
    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            return torch.zeros(2)

    save({"w": torch.ones(3)}, tmp_path / "c")
    with raises(IncompatibleStateError, "'w'", "room for (2,) where (3,) was saved"):
        load({"w": torch.zeros(3)}, tmp_path / "c", planner=Planner())


def test_a_file_with_an_object_that_was_cut_short_is_refused_before_memory_is_taken(
    tmp_path, monkeypatch
):
    save({"said": {"a": [1, "two"]}}, tmp_path / "c")
    (file,) = data_files(tmp_path / "c")
    os.truncate(file, file.stat().st_size - 1)
    monkeypatch.setattr(Reads, "make_detours", lambda self: pytest.fail("memory is taken"))
    with raises(CheckpointCorruptError, f"{file}", "the metadata say", "said"):
        load({"said": {"a": None}}, tmp_path / "c")
