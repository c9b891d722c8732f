"""Metadata whose checksum is right and whose content is malicious: refused, soon, and with little memory."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.state.checkpoints import load, load_everything, raises, save
from support.state.metadata import COLUMNS, decision_of, rewritten
from support.state.metadata_examples import Example, Object, Tensor, packed_example, sharded
from support.waiting import little_work
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates import DataStatesReader
from dcp_datastates.errors import (
    CheckpointCorruptError,
    ConfigurationError,
    UnreadableMetadataError,
)
from dcp_datastates.format import metadata_check
from dcp_datastates.format.metadata import decode, encode
from dcp_datastates.format.metadata_objects import table_of
from dcp_datastates.format.metadata_table import MetadataTable
from dcp_datastates.format.values import HAS_STRIDES

HUGE = 1 << 62


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
        for column, value in (("files", 0), ("begins", file[2]), ("lengths", nbytes)):
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


WRONG = {
    "no JSON": _document(b"{"),
    "nothing": _document(b""),
    "a list": _document(b"[]"),
    **{f"no {key}": _drop(key) for key in ("attempt", "files", "names", "properties")},
    "attempt none": _put("attempt", None),
    "attempt outside": _put("attempt", "../x"),
    "attempt a number": _put("attempt", 7),
    "after outside": _put("after", "../x"),
    "after a list": _put("after", []),
    "metrics a list": _put("metrics", []),
    "metric a string": _put("metrics", {"loss": "1"}),
    "time of publication none": _put("published_at", None),
    "time of publication endless": _put("published_at", float("inf")),
    "time of publication in no year": _put("published_at", 1e12),
    "time of publication before all": _put("published_at", -1.0),
    "names a string": _put("names", "w"),
    "name a number": _put("names", 0, 7),
    "name twice": _same_name,
    "names fewer": lambda parts: parts.document["names"].pop(),
    "properties none": _put("properties", None),
    "properties of one too few": lambda parts: parts.document["properties"].pop(),
    "properties a list": _put("properties", 0, ["dtype"]),
    **(
        {
            "strides of no numbers": _put("properties", 0, "strides", {"tuple": ["1"]}),
            "strides a list": _put("properties", 0, "strides", [1]),
        }
        if HAS_STRIDES
        else {}
    ),
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
    "compared a text": _put("compared", "1/2"),
    "compared without a plan": _put("compared", [1, 2]),
    "compared true": _put("compared", [True, 2, "p"]),
    "compared a part too many": _put("compared", [2, 2, "p"]),
    "compared a part below": _put("compared", [-1, 2, "p"]),
    "planner data of bytes": _put("planner_data", {"bytes": "6x"}),
    "planner data of an enum": _put("planner_data", {"enum": ["Metadata", "__init__"]}),
    "list of a billion": _put("planner_data", "tuples", "w", ["w", 1 << 40]),
    "list of a billion, past a flag": _put("planner_data", "tuples", "w", ["w", True, 1 << 40]),
    "list of a billion, past nothing": _put("planner_data", "tuples", "w", ["w", 1 << 40, None]),
    "list of a billion, as a list": _put("planner_data", {"dict": {"w": ["w", 1 << 40]}}),
    "list from behind": _put("planner_data", "tuples", "w", ["w", -1]),
    "a key that is a list": _put("planner_data", "tuples", "w", [{"tuple": [[1]]}]),
    "a key of three parts": _put("planner_data", "tuples", "w", [{"tuple": [1, "1", 1]}]),
    "a key whose text is none": _put("planner_data", "tuples", "w", [{"tuple": [1, 1]}]),
    "an empty dict on the way": _put("planner_data", "tuples", "w", [{"tuple": []}, "w"]),
    "an empty dict far down a list": _put(
        "planner_data", "tuples", "none", ["none", 1 << 40, {"tuple": []}]
    ),
    "planner data of tuples that are text": _put("planner_data", {"tuples": {"w": "w"}}),
    "planner data of tuples without keys": _put("planner_data", {"tuples": [["w"]]}),
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
    "file that is not there": _of_w("files", 1),
    "length one more": _of_w("lengths", 300 * 20 * 4 + 1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_malformed_metadata_are_refused_by_a_load(wrong, checkpoint):
    good = decision_of(checkpoint).read_bytes()
    rewritten(checkpoint, WRONG[wrong])
    assert decision_of(checkpoint).read_bytes() != good
    with little_work(5):
        with raises(UnreadableMetadataError, "decision"):
            load_everything(checkpoint)
        with raises(CheckpointCorruptError):
            load({"w": torch.zeros(300, 20)}, checkpoint)


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
        parts.columns["lengths"][-1] = table - parts.columns["begins"][-1]

    rewritten(checkpoint, promise)
    with raises(CheckpointCorruptError, "bytes"):
        load_everything(checkpoint)


def test_tensors_that_lie_in_one_another_are_damage(tmp_path):
    save({"v": torch.ones(30), "w": torch.ones(30)}, tmp_path)

    def overlap(parts):
        offsets = parts.columns["begins"]
        offsets[1] = offsets[0] + 4

    rewritten(tmp_path, overlap)
    with raises(CheckpointCorruptError, "overlap", "'v'", "'w'"):
        load({"v": torch.zeros(30), "w": torch.zeros(30)}, tmp_path)


# --- what is looked at before it is written ---------------------------------------------------------


def _refusal(make, *arguments):
    """What the file is refused with before it is committed, which says all that reading it would."""
    try:
        data = encode(make(*arguments))
    except ConfigurationError as error:
        return str(error)
    decode(data, Path("c"))
    return None


def _one(shape, path=("w",)):
    """A tensor of which a rank that saves alone has nothing."""
    entries = {"w": Tensor(0, shape, ()), "n": Object((0, 0, 9))}
    return Example(entries, (TensorProperties(),), ("f",), {"w": path, "n": ("n",)})


def _beside_nothing(shape):
    """The same beside a tensor without elements whose other sizes have no product in a float."""
    example = _one(shape)
    entries = {"empty": Tensor(0, (*(1 << 60,) * 63, 0), ()), **example.entries}
    return dataclasses.replace(
        example, entries=entries, mappings={"empty": ("empty",), **(example.mappings or {})}
    )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (_one((1 << 18,)), None),  # 1 MiB, and the files have 16 bytes: 65,536 times as much
        (_one(((1 << 18) + 1,)), "'w' has 1048580"),
        (_one((1 << 61,)), "larger than any tensor"),
        (_one((1 << 60,) * 64), "larger than any tensor"),
        (_one((*(1 << 60,) * 63, 0)), None),
        (_one((1 << 40, 1 << 40)), "larger than any tensor"),
        (_one((1 << 40, 1 << 40, 0)), None),
        (_beside_nothing((1 << 61,)), "larger than any tensor"),
        (_one((1,), ("w", 1 << 20)), None),
        (_one((1,), ("w", 1 << 25)), "longer than what is in them"),
        (_one((1,), ("w", -1)), "negative index"),
        (sharded(3, 2), None),
    ],
)
def test_what_could_not_be_read_again_is_not_written(case, words):
    packed, note = packed_example(case)
    expected = _refusal(table_of, packed.metadata(), packed.places(), note)
    assert expected is None if words is None else words in (expected or "")
    for _ in range(2):
        assert _refusal(MetadataTable, *packed.columns(), note) == expected


def test_a_catalog_is_looked_through_once():
    packed, note = packed_example(sharded(3, 2))
    catalog, placement = packed.columns()
    encode(MetadataTable(catalog, placement, note))
    with mock.patch.object(metadata_check, "validate", side_effect=AssertionError):
        encode(MetadataTable(catalog, placement, note))
        moved = dataclasses.replace(placement, begins=0 * placement.begins)
        with raises(ConfigurationError):
            encode(MetadataTable(catalog, moved, note))
