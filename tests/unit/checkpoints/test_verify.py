"""``verify`` sees every damage there is, says where it is and what it concerns, and invents none."""

import errno
import os
import random
import re
import tracemalloc
from pathlib import Path

import pytest
import torch
from support.state.checkpoints import load_everything, raises, save
from support.state.chunks import boxes, save_by_ranks
from support.state.files import data_files, flip_bit, put_back, read_file
from support.state.metadata import decision_of, rewritten
from support.state.roots import save_stock
from support.state.states import DTYPES, Opinion, filled
from support.tiers import sampled
from support.waiting import little_work

from dcp_datastates import copy, inspect, verify
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ForeignCheckpointError,
    StorageError,
)

MIB = 1 << 20
STATE = {
    "a": filled((700_000,), torch.float32, 1),
    "b": filled((33, 17), torch.bfloat16, 2),
    "c": filled((3_000_001,), torch.uint8, 3),
    "scalar": filled((), torch.float64, 4),
    "object": {"text": "t" * 50_000},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    save(STATE, path)
    assert verify(path).whole
    return path


@pytest.fixture
def checkpoint(saved):
    """The same for all tests: what one does to its files is undone."""
    with put_back(saved):
        yield saved


@pytest.fixture
def of_two_ranks(tmp_path):
    path = tmp_path / "two"
    dense = filled((4, 300_000), torch.float32)
    boxes_of_all = boxes(dense.shape, [[1, 2, 3], []])
    save_by_ranks(
        path, [{"sharded": (dense, boxes_of_all[:2])}, {"sharded": (dense, boxes_of_all[2:])}]
    )
    assert len(data_files(path)) == 4, "two chunks of one tensor on each rank"
    assert verify(path).whole
    return path


def _only_damage(path, **options):
    (damage,) = verify(path, **options).damages
    return damage


# --- whole ----------------------------------------------------------------------------------------


def test_a_whole_checkpoint_is_whole_and_counted(checkpoint):
    report = verify(checkpoint)
    assert report.whole
    assert (report.files, report.tensors, report.objects) == (1, 4, 1)
    files = [decision_of(checkpoint), *data_files(checkpoint)]
    assert report.nbytes == sum(file.stat().st_size for file in files)
    assert report.path == checkpoint
    assert report.attempt == data_files(checkpoint)[0].parent.name


AWKWARD = {str(dtype): filled((3, 5), dtype) for dtype in DTYPES}
AWKWARD |= {f"scalar {dtype}": filled((), dtype) for dtype in DTYPES}
AWKWARD |= {"empty": torch.empty(0, 7), "__metadata__": torch.ones(3), "naïve\n": torch.ones(1)}
AWKWARD |= {"__dcp_datastates__.crc32c.r00000-0": torch.ones(2), "object": Opinion("x")}


@pytest.mark.parametrize("names", [AWKWARD, (), ("object",), ("empty",)], ids=len)
def test_awkward_dtypes_shapes_and_names_and_next_to_nothing_are_whole(names, tmp_path):
    save({name: AWKWARD[name] for name in names}, tmp_path)
    assert verify(tmp_path).damages == ()


def test_uneven_and_empty_shards_are_whole(tmp_path):
    dense = filled((5, 3), torch.int16)
    rows = boxes(dense.shape, [[1, 4], []])
    save_by_ranks(tmp_path, [{"x": (dense, [row])} for row in rows])
    assert verify(tmp_path).damages == ()


def test_an_uncommitted_attempt_beside_it_is_no_damage(checkpoint):
    attempt = checkpoint / "ffffffffffffffff-00000001"
    attempt.mkdir()
    (attempt / "r00000-0.safetensors").write_bytes(b"half")
    assert verify(checkpoint).whole


# --- flipped bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", sampled(range(30), keep=range(5)))
def test_a_flipped_bit_anywhere_in_a_data_file_is_one_damage_at_that_place(seed, checkpoint):
    (path,) = data_files(checkpoint)
    chance = random.Random(seed)
    offset = chance.randrange(path.stat().st_size)
    flip_bit(path, offset, chance.randrange(8))
    report = verify(checkpoint, threads=1 + seed % 3)
    (table,) = (key for key in read_file(path).header if "crc32c" in key)
    covering = [d for d in report.damages if d.offset <= offset < d.offset + d.nbytes]
    assert len(covering) == 1, report.damages
    assert covering[0].file == path.relative_to(checkpoint).as_posix()
    if offset < read_file(path).span(table)[0]:
        assert report.damages == tuple(covering)


@pytest.mark.parametrize("name", ["a", "b", "c", "scalar", "object.text"])
def test_the_damage_names_the_tensor_and_its_place(name, checkpoint):
    (path,) = data_files(checkpoint)
    begin, end = read_file(path).span(name)
    flip_bit(path, (begin + end) // 2, 3)
    damage = _only_damage(checkpoint)
    assert name.removesuffix(".text") in {tensor.removesuffix(".text") for tensor in damage.tensors}
    assert damage.offset == (begin + end) // 2 // MIB * MIB
    others = {
        key
        for key in ("a", "b", "c", "scalar")
        if read_file(path).span(key)[1] <= damage.offset
        or read_file(path).span(key)[0] >= damage.offset + damage.nbytes
    }
    assert not others & set(damage.tensors)


@pytest.mark.parametrize("offset", [0, 7, 8, 30, 200])
def test_a_flipped_bit_in_the_header_is_seen(offset, checkpoint):
    (path,) = data_files(checkpoint)
    flip_bit(path, offset)
    damage = _only_damage(checkpoint)
    assert damage.offset == 0
    assert "header" in damage.problem


def test_a_flipped_bit_in_the_tables_own_checksum_condemns_the_table_alone(checkpoint):
    (path,) = data_files(checkpoint)
    flip_bit(path, path.stat().st_size - 1)
    damage = _only_damage(checkpoint)
    assert "table" in damage.problem
    assert damage.offset + damage.nbytes == path.stat().st_size
    assert set(damage.tensors) == {"a", "b", "c", "scalar", "object.text"}, "none of them loads"


def test_a_flipped_bit_in_a_table_word_leaves_open_which_of_the_two_is_damaged(checkpoint):
    (path,) = data_files(checkpoint)
    (table,) = (key for key in read_file(path).header if "crc32c" in key)
    flip_bit(path, read_file(path).span(table)[0] + 4 * 2)
    block, word = verify(checkpoint).damages
    assert (block.offset, block.nbytes) == (2 * MIB, MIB)
    assert "may itself" in block.problem
    assert "table" in word.problem


@pytest.mark.parametrize("seed", sampled(range(10), keep=range(5)))
def test_a_flipped_bit_in_the_metadata_is_damage(seed, checkpoint):
    path = decision_of(checkpoint)
    chance = random.Random(seed)
    flip_bit(path, chance.randrange(path.stat().st_size), chance.randrange(8))
    report = verify(checkpoint)
    assert [damage.file for damage in report.damages] == [".metadata"]
    assert report.attempt is None


# --- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 7, 4096, 2 * MIB, -1, -4, -100])
def test_a_data_file_that_was_cut_short_is_one_damage(keep, checkpoint):
    (path,) = data_files(checkpoint)
    size = path.stat().st_size
    os.truncate(path, keep % size)
    damage = _only_damage(checkpoint)
    assert "cut short" in damage.problem
    assert damage.offset == keep % size
    assert "a" in damage.tensors


def test_a_data_file_that_grew_is_damage_and_is_read_all_the_same(checkpoint):
    (path,) = data_files(checkpoint)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0" * 10)
    damage = _only_damage(checkpoint)
    assert (damage.offset, damage.nbytes) == (size, 10)
    flip_bit(path, 3 * MIB)
    assert [d.offset for d in verify(checkpoint).damages] == [3 * MIB, size]


def test_missing_metadata_are_no_checkpoint(checkpoint):
    decision_of(checkpoint).unlink()
    with raises(CheckpointNotFoundError, "no decision"):
        verify(checkpoint)


def test_each_damage_of_several_files_is_reported(of_two_ranks):
    first, second, third, fourth = data_files(of_two_ranks)
    first.unlink()
    flip_bit(second, 10_000)
    flip_bit(second, MIB + 10_000)
    os.truncate(third, 5000)
    report = verify(of_two_ranks)
    names = [path.relative_to(of_two_ranks).as_posix() for path in (first, second, third, fourth)]
    assert [damage.file for damage in report.damages] == names[:3]
    assert [damage.offset for damage in report.damages] == [None, 0, 5000]
    assert all(damage.tensors == ("sharded",) for damage in report.damages)


def test_neighbouring_blocks_are_one_damage_and_others_are_not(tmp_path):
    save({"x": filled((20 * MIB,), torch.uint8)}, tmp_path)
    (path,) = data_files(tmp_path)
    for block in (2, 6, 7, 8, 9, 15):  # 7 and 8 belong to different pieces
        flip_bit(path, block * MIB + 5)
    places = [(damage.offset // MIB, damage.nbytes // MIB) for damage in verify(tmp_path).damages]
    assert places == [(2, 1), (6, 4), (15, 1)]


def test_a_media_error_is_damage_of_just_that_block(checkpoint, monkeypatch):
    real = os.preadv

    def preadv(descriptor, views, offset):
        if offset <= 2 * MIB + 77 < offset + len(views[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    damage = _only_damage(checkpoint)
    assert (damage.offset, damage.nbytes) == (2 * MIB, MIB)
    assert "Input/output error" in damage.problem


def test_what_keeps_it_from_reading_is_an_error_not_damage(checkpoint, monkeypatch):
    (path,) = data_files(checkpoint)

    def refuse(descriptor, *more):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(descriptor, *more)

    real = os.preadv
    monkeypatch.setattr(os, "preadv", refuse)
    with raises(StorageError, path.name, "Permission denied"):
        verify(checkpoint)


def test_no_descriptor_stays_open(of_two_ranks):
    flip_bit(data_files(of_two_ranks)[1], 0)
    os.truncate(data_files(of_two_ranks)[2], 10)
    before = sorted(os.listdir("/proc/self/fd"))
    verify(of_two_ranks)
    assert sorted(os.listdir("/proc/self/fd")) == before


# --- metadata that disagree, their checksums intact -------------------------------------------------


@pytest.fixture
def small(tmp_path):
    save({"first": torch.arange(6.0), "second": torch.arange(6.0, 12.0)}, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("shape", "words"), [(9, "'first': its chunks leave gaps"), (3, "first has out of bounds")]
)
def test_metadata_that_contradict_themselves_are_damage(shape, words, small):
    """What they may contradict themselves in: ``tests/unit/format``."""
    rewritten(small, lambda parts: parts.columns["shapes"].__setitem__(0, shape))
    damage = _only_damage(small)
    assert words in damage.problem


# --- what is not damage -----------------------------------------------------------------------------


def test_a_stock_checkpoint_is_named_as_such_also_where_a_save_was_begun(tmp_path):
    save_stock(tmp_path)
    (tmp_path / "ffffffffffffffff-00000001").mkdir()
    with raises(ForeignCheckpointError, "stock"):
        verify(tmp_path)


def test_metadata_cut_where_a_pickle_might_end_are_not_taken_for_stock(tmp_path):
    save({"dots.in.the.name": torch.ones(3), "w": torch.ones(1)}, tmp_path)
    path = decision_of(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"in.the.name") + 3])
    assert path.read_bytes().endswith(b".")
    assert _only_damage(tmp_path).file == ".metadata"


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_called_damaged(checkpoint, monkeypatch):
    (path,) = data_files(checkpoint)
    real = os.open

    def open_late(name, *arguments, **options):
        if str(name) == str(path):
            monkeypatch.setattr(os, "open", real)
            save({"x": torch.ones(3)}, checkpoint)
        return real(name, *arguments, **options)

    monkeypatch.setattr(os, "open", open_late)
    with raises(CheckpointReplacedError, "verify again", path.parent.name):
        verify(checkpoint)
    assert verify(checkpoint).whole


# --- progress, memory, time --------------------------------------------------------------------------


def test_progress_grows_and_ends_at_all_of_it(of_two_ranks):
    os.truncate(data_files(of_two_ranks)[0], 10)
    calls = []
    verify(of_two_ranks, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert len({total for _, total in calls}) == 1
    assert calls[-1][0] == calls[-1][1]


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    save({"x": torch.zeros(64 * MIB, dtype=torch.uint8)}, tmp_path)
    tracemalloc.start()
    try:
        assert verify(tmp_path, threads=2).whole
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 * MIB


def test_ten_thousand_tensors_take_seconds_at_most(tmp_path):
    save({f"layer.{number}.weight": torch.ones(3) for number in range(10_000)}, tmp_path)
    flip_bit(data_files(tmp_path)[0], data_files(tmp_path)[0].stat().st_size - 1)
    with little_work(10):
        assert verify(tmp_path).tensors == 10_000
    with little_work(8):
        assert len(inspect(tmp_path).tensors) == 10_000


# --- as text ----------------------------------------------------------------------------------------


def test_a_report_reads_as_text(checkpoint):
    verdict, counts = str(verify(checkpoint)).splitlines()
    assert verdict == f"{checkpoint}: whole"
    assert re.fullmatch(
        r"  1 file, 4 tensors, 1 object: \d+\.\d\d MiB in \d+\.\d s \(.*/s\)", counts
    )
    (path,) = data_files(checkpoint)
    flip_bit(path, read_file(path).span("c")[0] + 2 * MIB)
    flip_bit(path, path.stat().st_size - 1)
    verdict, _, first, second = str(verify(checkpoint)).splitlines()
    assert verdict == f"{checkpoint}: damaged in 2 places"
    name = path.relative_to(checkpoint)
    assert re.fullmatch(
        rf"  {name} at byte \d+ \(1048576 bytes\): does not match its checksum.*; concerns 'c'",
        first,
    )
    assert "table" in second


def test_nothing_is_changed_by_looking(checkpoint):
    before = {path: path.stat().st_mtime_ns for path in Path(checkpoint).rglob("*")}
    verify(checkpoint)
    assert {path: path.stat().st_mtime_ns for path in Path(checkpoint).rglob("*")} == before
    load_everything(checkpoint)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_advice_that_is_refused_stops_neither_verify_nor_copy(
    number, checkpoint, tmp_path, monkeypatch
):
    """``posix_fadvise`` is refused in some sandboxes, and by some file systems."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert verify(checkpoint).whole
    copy(checkpoint, tmp_path / "copy")
    assert verify(tmp_path / "copy").whole
