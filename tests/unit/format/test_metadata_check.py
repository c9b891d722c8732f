"""Metadata whose checksum is right and whose content is malicious: refused, soon, and with little memory."""

from __future__ import annotations

import json
import re
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.checkpoints import assert_same, load, load_everything, raises, save, writer
from support.metadata import COLUMNS, ended, file_of, parts_of, rewritten, with_format
from support.states import DTYPES, filled
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_datastates import (
    CheckpointCorruptError,
    ConfigurationError,
    DataStatesReader,
    UnreadableMetadataError,
)
from dcp_datastates.format import trailer, values
from dcp_datastates.format.chunk_table import Catalog
from dcp_datastates.format.metadata import decode
from dcp_datastates.format.ragged import positions, starts_of

STATE = {
    "w": filled((300, 20), torch.float32, 1),
    "list": [filled((3,), torch.int64, 2), {"deep": filled((), torch.bfloat16, 3)}],
    "object": {"text": "some text"},
}
PATH = Path("c/.metadata")
HUGE = 1 << 62


@pytest.fixture
def checkpoint(tmp_path):
    save(STATE, tmp_path)
    return tmp_path


# --- the file -----------------------------------------------------------------------------------------


def test_a_file_is_what_the_layout_says(checkpoint):
    """By other code than the package's."""
    data = (checkpoint / ".metadata").read_bytes()
    parts = parts_of(checkpoint)
    assert data.startswith(b"\x80\x04")
    assert parts.pickled.endswith(b".")
    assert set(parts.document) == {
        *("attempt", "after", "files", "names", "properties"),
        *("planner_data", "version", "storage_meta", "further"),
    }
    assert sorted(parts.document["names"]) == ["list.0", "list.1.deep", "object.text", "w"]
    assert parts.document["planner_data"]["dict"]["list.1.deep"] == {"tuple": ["list", 1, "deep"]}
    place = parts.place("w")
    assert parts.columns["chunk_lengths"][place] == 300 * 20 * 4
    assert file_of(parts)[: len(parts.pickled)] == data[: len(parts.pickled)]
    rewritten(checkpoint, lambda parts: None)
    assert_same(load_everything(checkpoint), STATE)


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, ["format 1", "format 2", "HuggingFaceStorageReader"]), (3, ["format 3", "upgrade"])],
)
def test_another_format_is_refused_by_name_with_the_way_out(number, words, checkpoint):
    file = checkpoint / ".metadata"
    other = with_format(file.read_bytes(), number)
    file.write_bytes(other)
    with raises(UnreadableMetadataError, str(file), *words):
        load_everything(checkpoint)
    for at in range(len(other) - 24, len(other)):  # what is damaged is not taken for another format
        broken = bytearray(other)
        broken[at] ^= 1
        with pytest.raises(CheckpointCorruptError, match=re.escape(str(file))) as raised:
            decode(bytes(broken), file)
        assert type(raised.value) is CheckpointCorruptError


def _split(data: bytes) -> tuple[bytes, int, list[tuple[int, int]]]:
    """All before the directory, where the columns begin, and the directory."""
    count = 1 + len(COLUMNS)
    directory = data[-24 - 9 * count : -24]
    (pickle_bytes,) = struct.unpack_from("<Q", data, len(data) - 16)
    return data[: -24 - len(directory)], pickle_bytes, list(struct.iter_unpack("<BQ", directory))


def _with_directory(data: bytes, entries: list[tuple[int, int]]) -> bytes:
    before, pickle_bytes, _ = _split(data)
    return ended(before + b"".join(struct.pack("<BQ", *entry) for entry in entries), pickle_bytes)


def test_directories_that_do_not_fit_the_file_are_refused(checkpoint):
    data = (checkpoint / ".metadata").read_bytes()
    _, pickle_bytes, entries = _split(data)
    assert _with_directory(data, entries) == data
    for place, (width, length) in enumerate(entries):
        for wrong in [
            *((width, wrong) for wrong in (length + 1, HUGE, (1 << 64) - 1)),
            *((wrong, length) for wrong in (0, 3, 16, 255)),
        ]:
            changed = [*entries[:place], wrong, *entries[place + 1 :]]
            with raises(UnreadableMetadataError, "c/.metadata"):
                decode(_with_directory(data, changed), PATH)
    whole = data[:-24]
    for pickle_at in (0, pickle_bytes - 1, pickle_bytes + 1, len(data), HUGE, (1 << 64) - 1):
        with raises(UnreadableMetadataError, "c/.metadata"):
            decode(ended(whole, pickle_at), PATH)
    for count in (0, 1, 12, 14, (1 << 32) - 1):
        with raises(UnreadableMetadataError, "c/.metadata"):
            decode(ended(whole, pickle_bytes, count=count), PATH)
    with raises(UnreadableMetadataError, "c/.metadata"):
        decode(ended(b"", 0), PATH)


def test_a_document_of_wider_values_is_refused(checkpoint):
    parts = parts_of(checkpoint)
    text = json.dumps(parts.document).encode()
    parts.document = text + b" " * (len(text) % 2)
    data = file_of(parts)
    assert decode(data, PATH)
    _, _, ((_, length), *entries) = _split(data)
    with raises(UnreadableMetadataError, "c/.metadata"):
        decode(_with_directory(data, [(2, length // 2), *entries]), PATH)


def test_columns_of_any_width_are_read(checkpoint):
    data = (checkpoint / ".metadata").read_bytes()
    expected = trailer.parse(data, PATH)[1]
    wide = file_of(parts_of(checkpoint))
    assert len(wide) > len(data)
    found = trailer.parse(wide, PATH)[1]
    assert {name: column.tolist() for name, column in found.items()} == {
        name: column.tolist() for name, column in expected.items()
    }


# --- the document -------------------------------------------------------------------------------------


def _put(*path):
    """A change that gives the document ``path[-1]`` at the keys before it."""

    def change(parts):
        at = parts.document
        for key in path[:-2]:
            at = at[key]
        at[path[-2]] = path[-1]

    return change


def _drop(key):
    return lambda parts: parts.document.pop(key)


def _document(data):
    def change(parts):
        parts.document = data

    return change


def _column(name, value, at=0):
    def change(parts):
        parts.columns[name][at] = value(parts.columns[name][at]) if callable(value) else value

    return change


def _of_w(name, value, offset=0):
    """Of a column by names, or of places, the value for ``w``."""

    def change(parts):
        number = parts.document["names"].index("w")
        at = number if name in ("properties", "ndims", "counts") else parts.place("w")
        if name in ("shapes", "offsets", "sizes"):
            # All chunks are whole tensors here, so that the three columns have the same lengths.
            at = sum(parts.columns["ndims"][:number]) + offset
        parts.columns[name][at] = value

    return change


def _longer(name, more=(0,)):
    return lambda parts: parts.columns[name].extend(more)


def _shorter(name):
    return lambda parts: parts.columns[name].pop()


def _same_name(parts):
    names = parts.document["names"]
    names[names.index("w")] = "list.0"


def _same_file(parts):
    parts.document["files"] *= 2


def _one_more_chunk(name, nbytes):
    """Give ``name``, which has no dimensions, another chunk, in bytes that are added to the file for it."""

    def change(parts):
        number = parts.document["names"].index(name)
        row = sum(parts.columns["counts"][: number + 1])
        file = parts.document["files"][0]
        parts.columns["counts"][number] += 1
        for column, value in (
            ("chunk_files", 0),
            ("chunk_offsets", file[2]),
            ("chunk_lengths", nbytes),
        ):
            parts.columns[column].insert(row, value)
        table = file[2] + 4
        file[1:] = [table + 4 * (-(-table // (1 << 20)) + 1), table]

    return change


def _cancelling(column, of_w, of_other):
    """Of ``w``, which has two dimensions, and of another tensor, which has one; their sums stay what they were."""

    def change(parts):
        names = parts.document["names"]
        parts.columns[column][names.index("w")] = of_w
        parts.columns[column][names.index("list.0")] = of_other

    return change


DEEP = b'{"names":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
DIGITS = b'{"names":' + b"9" * 4_000_000 + b"}"

WRONG = {
    "no JSON": _document(b"{"),
    "nothing": _document(b""),
    "a list": _document(b"[]"),
    "no UTF-8": _document(b'{"\xff":1}'),
    "deep": _document(DEEP),
    "many digits": _document(DIGITS),
    **{f"no {key}": _drop(key) for key in ("attempt", "files", "names", "properties", "further")},
    "attempt none": _put("attempt", None),
    "attempt outside": _put("attempt", "../x"),
    "attempt a number": _put("attempt", 7),
    "after outside": _put("after", "../x"),
    "after a list": _put("after", []),
    "version a list": _put("version", []),
    "storage_meta a list": _put("storage_meta", []),
    "storage_meta with more": _put("storage_meta", "__setattr__", 1),
    "names a string": _put("names", "w"),
    "name a number": _put("names", 0, 7),
    "name twice": _same_name,
    "names fewer": lambda parts: parts.document["names"].pop(),
    "properties none": _put("properties", None),
    "properties of one too few": lambda parts: parts.document["properties"].pop(),
    "dtype a string": _put("properties", 0, "dtype", "float32"),
    "dtype none": _put("properties", 0, "dtype", None),
    "dtype a class": _put("properties", 0, "dtype", {"dtype": "Tensor"}),
    "dtype of a module": _put("properties", 0, "dtype", {"dtype": "nn.float32"}),
    "layout a number": _put("properties", 0, "layout", 1),
    "memory format a layout": _put("properties", 0, "memory_format", {"layout": "strided"}),
    "requires_grad a number": _put("properties", 0, "requires_grad", 1),
    "files a dict": _put("files", {}),
    "file of a number": _put("files", 0, 0, 5),
    "file outside": _put("files", 0, 0, "../x"),
    "file further outside": _put("files", 0, 0, "a/../../x"),
    "file absolute": _put("files", 0, 0, "/etc/passwd"),
    "file with NUL": _put("files", 0, 0, "a\0b"),
    "file with a line": _put("files", 0, 0, "a\nb"),
    "file of nothing": _put("files", 0, 0, ""),
    "file twice": _same_file,
    "file of one size": _put("files", 0, ["x", 1]),
    "file sizes text": _put("files", 0, 1, "8"),
    "file sizes floats": _put("files", 0, 1, 8.0),
    "file sizes true": _put("files", 0, 2, True),
    "file sizes negative": _put("files", 0, 2, -4),
    "file sizes huge": _put("files", 0, ["x", 1 << 70, (1 << 70) - 4]),
    "file without a table": _put("files", 0, ["x", 4096, 4096]),
    "planner data a tag": _put("planner_data", {"pickle": "x"}),
    "planner data two tags": _put("planner_data", {"dict": {}, "tuple": []}),
    "planner data no tag": _put("planner_data", {}),
    "planner data of a size": _put("planner_data", {"Size": [1 << 70]}),
    "planner data of bytes": _put("planner_data", {"bytes": "6x"}),
    "planner data of an enum": _put("planner_data", {"enum": ["Metadata", "__init__"]}),
    "list of a billion": _put("planner_data", "dict", "w", {"tuple": ["w", 1 << 40]}),
    "list of a billion, past a flag": _put(
        "planner_data", "dict", "w", {"tuple": ["w", True, 1 << 40]}
    ),
    "list of a billion, past nothing": _put(
        "planner_data", "dict", "w", {"tuple": ["w", 1 << 40, None]}
    ),
    "list of a billion, as a list": _put("planner_data", "dict", "w", ["w", 1 << 40]),
    "list from behind": _put("planner_data", "dict", "w", {"tuple": ["w", -1]}),
    # --- columns, which have as many values as the names, tensors and chunks say
    **{f"{name} longer": _longer(name) for name in COLUMNS},
    **{f"{name} shorter": _shorter(name) for name in COLUMNS},
    **{f"{name} huge": _column(name, HUGE) for name in COLUMNS},
    **{f"{name} largest": _column(name, (1 << 63) - 1) for name in COLUMNS},
    **{
        f"{name} beyond int64": _column(name, (1 << 64) - 1)
        for name in COLUMNS
        if name != "properties"
    },
    **{f"{name} negative": _column(name, -2) for name in COLUMNS},
    "an object with a chunk": lambda parts: parts.columns["counts"].__setitem__(
        parts.columns["properties"].index(-1), 1
    ),
    "an object with a chunk of its own": _one_more_chunk("object.text", 0),
    "a scalar with another chunk": _one_more_chunk("list.1.deep", 2),
    "counts that cancel out": _cancelling("counts", 2, -1),
    "dimensions that cancel out": _cancelling("ndims", 4, -1),
    "a tensor an object": _of_w("properties", -1),
    "of another table": _of_w("properties", 3),
    "size large": _of_w("shapes", 1 << 40),
    "size smaller than a chunk": _of_w("shapes", 299),
    "chunk larger": _of_w("sizes", 301),
    "chunk smaller than its bytes": _of_w("sizes", 299),
    "chunk beyond": _of_w("offsets", 1),
    "two chunks of a scalar": lambda parts: parts.columns["counts"].__setitem__(
        parts.document["names"].index("list.1.deep"), 2
    ),
    "65 dimensions": _of_w("ndims", 65),
    "file that is not there": _of_w("chunk_files", 1),
    "length one more": _of_w("chunk_lengths", 300 * 20 * 4 + 1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_malformed_metadata_are_refused_by_a_load(wrong, checkpoint):
    good = (checkpoint / ".metadata").read_bytes()
    rewritten(checkpoint, WRONG[wrong])
    assert (checkpoint / ".metadata").read_bytes() != good
    started = time.monotonic()
    with raises(UnreadableMetadataError, ".metadata"):
        load_everything(checkpoint)
    with raises(CheckpointCorruptError):
        load({"w": torch.zeros(300, 20)}, checkpoint)
    assert time.monotonic() - started < 5


def test_a_name_that_the_state_does_not_have_is_only_a_name(checkpoint):
    """Nothing is done with names but comparing them."""
    strange = "../../\0\ud800\n" + "x" * 100_000
    rewritten(checkpoint, lambda parts: parts.document["names"].__setitem__(0, strange))
    assert strange in DataStatesReader(checkpoint).read_metadata().state_dict_metadata


def test_an_object_of_a_length_that_is_not_there_is_refused(checkpoint):
    """The metadata promise 1 TiB, and no buffer of that size is made."""

    def promise(parts):
        table = 1 << 40
        parts.document["files"][0][1:] = [table + 4 * ((table >> 20) + 1), table]
        parts.columns["object_lengths"][0] = table - parts.columns["object_offsets"][0]

    rewritten(checkpoint, promise)
    with raises(CheckpointCorruptError, "bytes"):
        load_everything(checkpoint)


# --- time and memory ----------------------------------------------------------------------------------


def _grid(parts, shape: tuple[int, ...], begins: np.ndarray, sizes: np.ndarray) -> None:
    """Make all of the metadata one tensor of these chunks, in a file that is as long as they need."""
    lengths = sizes.prod(axis=1)
    table = 4096 + int(lengths.sum() + 3) // 4 * 4
    name = parts.document["files"][0][0]
    parts.document.update(
        names=["w"],
        properties=[{**parts.document["properties"][0], "dtype": {"dtype": "uint8"}}],
        planner_data=None,
        files=[[name, table + 4 * (-(-table // (1 << 20)) + 1), table]],
    )
    parts.columns = {
        "properties": [0],
        "ndims": [len(shape)],
        "shapes": list(shape),
        "counts": [len(begins)],
        "offsets": begins.ravel().tolist(),
        "sizes": sizes.ravel().tolist(),
        "chunk_files": [0] * len(begins),
        "chunk_offsets": (4096 + np.cumsum(lengths) - lengths).tolist(),
        "chunk_lengths": lengths.tolist(),
        **{name: [] for name in ("object_files", "object_offsets", "object_lengths")},
    }


def _crossing_bars(count: int) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Bars along three axes that touch nowhere, and that no plane separates."""
    begins, sizes = [], []
    for axis in range(3):
        for number in range(count):
            begin = [0, 0, 0]
            begin[(axis + 1) % 3] = 2 * number
            begin[(axis + 2) % 3] = 2 * number + 1
            size = [1, 1, 1]
            size[axis] = 2 * count + 2
            begins.append(begin)
            sizes.append(size)
    return (2 * count + 2,) * 3, np.array(begins), np.array(sizes)


def _spiral(count: int) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Each cut separates one chunk from all others, along the other dimension than the last."""
    begins, sizes = [], []
    rows = columns = 2 * count
    top = left = 0
    for number in range(count):
        begins.append([top, left])
        if number % 2:
            sizes.append([rows, 1])
            left, columns = left + 1, columns - 1
        else:
            sizes.append([1, columns])
            top, rows = top + 1, rows - 1
    return (2 * count, 2 * count), np.array(begins), np.array(sizes)


@pytest.mark.parametrize("shapes", [_crossing_bars, _spiral], ids=["bars", "spiral"])
def test_chunks_that_would_take_for_ever_to_compare_are_refused_soon(shapes, checkpoint):
    few = shapes(20)
    rewritten(checkpoint, lambda parts: _grid(parts, *few))
    if shapes is _spiral:
        assert len(decode((checkpoint / ".metadata").read_bytes(), PATH).catalog.offsets) == 40
    rewritten(checkpoint, lambda parts: _grid(parts, *shapes(20_000)))
    started = time.monotonic()
    with raises(UnreadableMetadataError, "entangled"):
        load_everything(checkpoint)
    assert time.monotonic() - started < 10


def test_overlapping_chunks_are_refused(checkpoint):
    begins, sizes = np.array([[0, 0], [2, 3]]), np.array([[4, 4], [4, 4]])
    rewritten(checkpoint, lambda parts: _grid(parts, (8, 8), begins, sizes))
    with raises(UnreadableMetadataError, "w has overlapping chunks"):
        load_everything(checkpoint)


def test_tensors_that_lie_in_one_another_are_damage(tmp_path):
    save({"v": torch.ones(30), "w": torch.ones(30)}, tmp_path)

    def overlap(parts):
        offsets = parts.columns["chunk_offsets"]
        offsets[1] = offsets[0] + 4

    rewritten(tmp_path, overlap)
    with raises(CheckpointCorruptError, "overlap", "'v'", "'w'"):
        load({"v": torch.zeros(30), "w": torch.zeros(30)}, tmp_path)


def test_memory_is_in_proportion_to_the_file(checkpoint):
    count = 100_000
    begins = np.stack([np.arange(count), np.zeros(count, np.int64)], axis=1)
    rewritten(
        checkpoint, lambda parts: _grid(parts, (count, 1), begins, np.ones((count, 2), np.int64))
    )
    data = (checkpoint / ".metadata").read_bytes()
    tracemalloc.start()
    try:
        decode(data, PATH)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 40 * len(data), (most, len(data))


# --- what must still open -----------------------------------------------------------------------------


@pytest.mark.parametrize("flatten", [True, False])
def test_every_dtype_and_both_forms_of_state_open(flatten, tmp_path):
    state = {
        **{str(dtype): filled((3, 2), dtype, 5) for dtype in DTYPES},
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5),
        "channels last": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "gradient": torch.zeros(3, requires_grad=True),
        "nested": STATE if flatten else torch.zeros(2),
        "an object": {"a": [1, "b"]},
    }
    save(state, tmp_path, planner=DefaultSavePlanner(flatten_state_dict=flatten))
    if flatten:
        assert_same(load_everything(tmp_path), state)
    else:
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        found = load({k: torch.zeros_like(v.detach()) for k, v in tensors.items()}, tmp_path)
        assert_same(found, tensors)


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_checkpoint_id_of_either_kind_opens(as_path, tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=as_path(tmp_path), storage_writer=writer(None))
    assert load({"w": torch.zeros(3)}, tmp_path)["w"].tolist() == [1, 1, 1]


class _NotingPlanner(DefaultSavePlanner):
    """Notes something of its own beside the paths."""

    note: object = None

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data["mine"] = self.note
        return plans, metadata


SHARED = [1, 2]
NOTES = {
    "nested": {"a": [(1, 2.5), None, True, "b", b"c", -(1 << 40), 1 << 90, ("x", (), [])]},
    "shared": [SHARED, SHARED, {"a": SHARED}],
    "torch": [torch.float32, torch.strided, torch.Size((1, 2))],
    "shapes": {f"w{number}": (number, 11008) for number in range(3000)},
    "like a tag": {"tuple": [1], "dict": {"tuple": {}}},
    "text": "\ud800 ü\0\n",
    "infinite": float("inf"),
}


@pytest.mark.parametrize("note", NOTES)
def test_plain_data_of_a_planner_come_back(note, tmp_path):
    planner = _NotingPlanner()
    planner.note = NOTES[note]
    save({"w": torch.ones(3)}, tmp_path, planner=planner)
    for reader in (DataStatesReader, dcp.FileSystemReader):
        found = reader(tmp_path).read_metadata().planner_data["mine"]
        assert found == NOTES[note]
        assert repr(found) == repr(NOTES[note])


def _deep():
    value: list = []
    for _ in range(300):
        value = [value]
    return value


def _cycle():
    value: list = []
    value.append(value)
    return value


REFUSED = {
    "object": object(),
    "path": Path("x"),
    "deep": _deep(),
    "cycle": _cycle(),
    "set": {1, 2},
    "keys": {1: 2},
    "pattern": re.compile("x"),
    "huge": 10**100,
    "tensor": torch.ones(1),
    "memory format": torch.channels_last,  # which no pickle can hold
}


@pytest.mark.parametrize("note", REFUSED)
def test_what_has_no_place_in_the_metadata_is_refused_by_the_save(note, tmp_path):
    planner = _NotingPlanner()
    planner.note = REFUSED[note]
    with raises(ConfigurationError, "planner_data"):
        save({"w": torch.ones(3)}, tmp_path / "c", planner=planner)
    assert not (tmp_path / "c" / ".metadata").exists()


@pytest.mark.parametrize("text", [b"[[1]", b"1e", DEEP, DIGITS, b"\xff"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(values.ValueRefused):
        values.load(text)


def test_a_value_that_nests_deeply_is_refused():
    nested = json.loads("[" * 200 + "]" * 200)
    with pytest.raises(values.ValueRefused, match="deeper"):
        values.from_json(nested)


def test_rows_belong_to_their_names():
    catalog = Catalog(
        names=("a", "o", "b"),
        table=(),
        properties=np.array([0, -1, 0]),
        ndims=np.array([1, 0, 2]),
        shapes=np.zeros(3, np.int64),
        counts=np.array([2, 0, 1]),
        offsets=np.zeros(4, np.int64),
        sizes=np.zeros(4, np.int64),
        mappings=None,
    )
    assert catalog.owners().tolist() == [0, 0, 2, 1]
    ndims = catalog.ndims[[0, 0, 2]]
    assert positions(starts_of(ndims), ndims).tolist() == [0, 1, 2, 3]
