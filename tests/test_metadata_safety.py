"""Metadata whose checksums are right and whose content is malicious: refused, having done nothing."""

from __future__ import annotations

import copy
import io
import pickle
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.checkpoints import assert_same, load, load_everything, raises, save, writer
from support.metadata import body_of, rewritten, with_trailer
from support.states import DTYPES, filled
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates import CheckpointCorruptError, ConfigurationError
from dcp_datastates._native import scan_pickle
from dcp_datastates.format.metadata import decode
from dcp_datastates.format.pickling import metadata_pickler

STATE = {
    "w": filled((300, 20), torch.float32, 1),
    "list": [filled((3,), torch.int64, 2), {"deep": filled((), torch.bfloat16, 3)}],
    "object": {"text": "some text"},
}


@pytest.fixture
def checkpoint(tmp_path):
    save(STATE, tmp_path)
    return tmp_path


def _text(words: str) -> bytes:
    return b"\x8c" + bytes([len(words)]) + words.encode()


def _name(module: str, attribute: str) -> bytes:
    return _text(module) + _text(attribute) + b"\x93"


META = "torch.distributed.checkpoint.metadata"


def _refused(body: bytes, *words: str) -> None:
    with raises(CheckpointCorruptError, "c/.metadata", *words):
        decode(with_trailer(b"\x80\x04" + body + b"."), Path("c/.metadata"))


# --- the pickle machine ---------------------------------------------------------------------------


def test_a_class_gets_no_attributes():
    for state in (
        b"}" + _text("version") + b"Ks",
        b"N}" + _text("version") + _text("x") + b"s\x86",
    ):
        _refused(_name(META, "Metadata") + state + b"b")
    assert Metadata.version is None
    assert "version" not in vars(Metadata({}))["state_dict_metadata"]


def test_an_object_of_the_process_gets_no_attributes():
    member = dcp_metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    before = dict(vars(member))
    body = _name(META, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R}" + _text("owned") + b"K\x01sb"
    _refused(body, "did not just make")
    assert vars(member) == before


LENGTHS = {
    "LONG_BINPUT": b"Nr" + struct.pack("<I", 1 << 30),
    "BINPUT": b"Nq\xff",
    "BINBYTES8": b"\x8e" + struct.pack("<Q", 1 << 40),
    "BYTEARRAY8": b"\x96" + struct.pack("<Q", 1 << 40),
    "BINUNICODE8": b"\x8d" + struct.pack("<Q", 1 << 40),
    "FRAME": b"\x95" + struct.pack("<Q", 1 << 40) + b"N",
    "LONG4": b"\x8b" + struct.pack("<i", 1 << 30),
}


@pytest.mark.parametrize("opcode", LENGTHS)
def test_no_memory_is_taken_by_a_number_in_the_file(opcode):
    body = b"\x80\x04" + LENGTHS[opcode] + b"."
    ended = subprocess.run(
        [sys.executable, "-c", PEAK, body.hex()],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(entry for entry in sys.path if entry), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr


# Run in a process of its own, whose peak is its own.
PEAK = """
import resource, sys
from pathlib import Path
import torch.distributed.checkpoint
from support.metadata import with_trailer
from dcp_datastates import CheckpointCorruptError
from dcp_datastates.format.metadata import decode
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
try:
    decode(with_trailer(bytes.fromhex(sys.argv[1])), Path("c/.metadata"))
except CheckpointCorruptError as error:
    assert "the pickle " in str(error), error
else:
    raise SystemExit("it was not refused")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert after - before < 64 << 10, (before, after)
"""


def test_strings_do_not_double():
    path = _name("pathlib", "PurePosixPath")
    body = path + b"\x94" + _text("a" * 200) + b"\x85R\x94" + b"h\x00h\x01h\x01\x86R\x94"
    for number in range(2, 40):
        body += b"0h\x00" + bytes([ord("h"), number, ord("h"), number]) + b"\x86R\x94"
    _refused(body)
    _refused(path + _text("a") + b"\x85R", "pathlib")


@pytest.mark.parametrize(
    "body",
    [
        b"N" + b"\x85" * 1_000_000,
        b"}N" + b"\x85" * 1_000_000 + b"Ns",
        b"]" * 100_000 + b"a" * 99_999,
        b"(" * 100_000 + b"t" * 100_000,
        b"}K\x01" * 100_000 + b"N" + b"s" * 100_000,
    ],
    ids=["tuples", "a key", "lists", "marks", "dicts"],
)
def test_deep_nesting_is_refused(body):
    _refused(body, "deeper")


def test_a_key_that_takes_for_ever_to_hash_is_refused():
    body = b"}N\x94"
    for number in range(60):
        body += bytes([ord("h"), number]) + b"\x86\x94"
    started = time.monotonic()
    _refused(b"}" + b"K\x01\x94" + body[3:] + b"Ns")
    assert time.monotonic() - started < 5


def _colliding_offsets(count: int) -> list[tuple[int, int]]:
    """Pairs with one hash, by going through CPython's tuple hash backwards."""
    mask = (1 << 64) - 1
    one, two, five = 11400714785074694791, 14029467366897019727, 2870177450012600261

    def rotated(value: int, by: int) -> int:
        return ((value << by) | (value >> (64 - by))) & mask

    after = (12345 - (2 ^ (five ^ 3527539))) & mask
    after = rotated(after * pow(one, -1, 1 << 64) & mask, 33)
    found = []
    first = 0
    while len(found) < count:
        before = rotated((five + first * two) & mask, 31) * one & mask
        second = (after - before) * pow(two, -1, 1 << 64) & mask
        if second < (1 << 61) - 1:
            found.append((first, second))
        first += 1
    return found


def test_keys_made_to_collide_are_refused(checkpoint):
    offsets = _colliding_offsets(3000)
    assert len({hash(torch.Size(offset)) for offset in offsets}) == 1
    keys = _colliding_offsets(3000)

    def collide(metadata):
        place = next(iter(metadata.storage_data.values()))
        items = [(MetadataIndex("w", offset), place) for offset in keys]
        metadata.storage_data = _Items(items)

    rewritten(checkpoint, collide)
    started = time.monotonic()
    with raises(CheckpointCorruptError, "collide"):
        load_everything(checkpoint)
    assert time.monotonic() - started < 2, "it was not seen before the dict was filled"


class _Items:
    """Pickles as a dict of its items without ever being one: that would take as long as the attack."""

    def __init__(self, items):
        self.items = items

    def __reduce__(self):
        return OrderedDict, (), None, None, iter(self.items)


CALLS = {
    "a list": _name("collections", "OrderedDict") + b"]\x85R",
    "a long tuple": _name("torch", "Size") + b"(" + b"K\x01" * 100_000 + b"t\x85R",
    "two": _name("torch", "Size") + b"K\x01K\x02\x86R",
    "an instance": _name(META, "BytesStorageMetadata") + b")\x81)R",
    "new with arguments": _name("torch", "Size") + b"K\x01\x85\x85\x81",
    "a layout that is none": _name("torch.serialization", "_get_layout") + _text("x") + b"\x85R",
    "no memory format": _name(META, "_MEM_FORMAT_ENCODING") + b"K\x63\x85R",
    "a dtype": _name("torch", "float32") + b")R",
    "no class": _name("torch", "float32") + b")\x81",
    "a dataclass": _name(META, "Metadata") + b"}\x85R",
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_metadata_do_not_make_are_refused(call):
    _refused(CALLS[call])


NEVER = {
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x00",
    "EXT4": b"\x84\x01\x00\x00\x00",
    "PERSID": b"P1\n",
    "BINPERSID": b"K\x01Q",
    "NEXT_BUFFER": b"\x97",
    "READONLY": b"N\x98",
    "INST": b"(ios\nsystem\n",
    "OBJ": b"(cos\nsystem\no",
    "NEWOBJ_EX": b"NNN\x92",
    "INT": b"I1\n",
    "LONG": b"L1L\n",
    "FLOAT": b"F1\n",
    "STRING": b"S'a'\n",
    "UNICODE": b"Va\n",
    "GET": b"g0\n",
    "PUT": b"Np0\n",
    "DUP": b"N2\x86",
    "POP": b"NN0",
    "POP_MARK": b"N(1",
    "LIST": b"(l",
    "DICT": b"(d",
    "BINSTRING": b"U\x01a",
}


@pytest.mark.parametrize("opcode", NEVER)
def test_opcodes_that_metadata_do_not_have_are_refused(opcode):
    _refused(NEVER[opcode], "opcode")


# --- objects of the right classes, wrong inside ------------------------------------------------------


def _tensor(metadata) -> TensorStorageMetadata:
    return metadata.state_dict_metadata["w"]


def _place(metadata) -> _StorageInfo:
    return metadata.storage_data[MetadataIndex("w", (0, 0))]


def _set(find, name, value):
    def change(metadata):
        vars(find(metadata))[name] = value

    return change


def _drop(find, name):
    def change(metadata):
        del vars(find(metadata))[name]

    return change


def _itself(metadata):
    return metadata


def _chunk(metadata) -> ChunkStorageMetadata:
    return _tensor(metadata).chunks[0]


def _rekeyed(**changes):
    def change(metadata):
        key = MetadataIndex("w", (0, 0))
        other = copy.copy(key)
        vars(other).update(changes)
        metadata.storage_data[other] = metadata.storage_data.pop(key)

    return change


def _note(**changes):
    def change(metadata):
        vars(metadata)["dcp_datastates"].update(changes)

    return change


def _file(name=None, sizes=None):
    def change(metadata):
        files = vars(metadata)["dcp_datastates"]["files"]
        (old,) = files
        files[old if name is None else name] = files.pop(old) if sizes is None else sizes

    return change


def _entry(name, value):
    def change(metadata):
        metadata.state_dict_metadata[name] = value

    return change


def _properties(metadata) -> TensorProperties:
    return _tensor(metadata).properties


HUGE = 1 << 62
WRONG = {
    "entries a list": _set(_itself, "state_dict_metadata", []),
    "entries none": _set(_itself, "state_dict_metadata", None),
    "no entries": _drop(_itself, "state_dict_metadata"),
    "entry a dict": _entry("w", {}),
    "entry a class": _entry("w", TensorStorageMetadata),
    "entry a chunk": _entry("w", ChunkStorageMetadata(torch.Size(), torch.Size())),
    "name a number": _entry(7, dcp_metadata.BytesStorageMetadata()),
    "version a list": _set(_itself, "version", []),
    "storage_meta a dict": _set(_itself, "storage_meta", {}),
    "storage_meta with more": _set(lambda m: m.storage_meta, "__setattr__", 1),
    "size a tuple": _set(_tensor, "size", (300, 20)),
    "size none": _set(_tensor, "size", None),
    "size missing": _drop(_tensor, "size"),
    "size negative": _set(_tensor, "size", torch.Size((-300, -20))),
    "size huge": _set(_tensor, "size", torch.Size((HUGE, HUGE))),
    "size large": _set(_tensor, "size", torch.Size((1 << 40, 20))),
    "size of another rank": _set(_tensor, "size", torch.Size((300, 20, 1))),
    "chunks a tuple": _set(_tensor, "chunks", ()),
    "chunks a number": _set(_tensor, "chunks", 1),
    "chunks missing": _drop(_tensor, "chunks"),
    "chunk none": _set(_tensor, "chunks", [None]),
    "chunk without sizes": _drop(_chunk, "sizes"),
    "chunk sizes a list": _set(_chunk, "sizes", [300, 20]),
    "chunk sizes negative": _set(_chunk, "sizes", torch.Size((-1, -1))),
    "chunk sizes huge": _set(_chunk, "sizes", torch.Size((HUGE, HUGE))),
    "chunk offsets a string": _set(_chunk, "offsets", "00"),
    "chunk offsets negative": _set(_chunk, "offsets", torch.Size((-1, 0))),
    "chunk offsets beyond": _set(_chunk, "offsets", torch.Size((1, 0))),
    "chunk offsets of another rank": _set(_chunk, "offsets", torch.Size((0,))),
    "properties none": _set(_tensor, "properties", None),
    "dtype a string": _set(_properties, "dtype", "float32"),
    "dtype none": _set(_properties, "dtype", None),
    "layout a number": _set(_properties, "layout", 1),
    "requires_grad a number": _set(_properties, "requires_grad", 1),
    "storage_data a list": _set(_itself, "storage_data", []),
    "storage_data none": _set(_itself, "storage_data", None),
    "place a tuple": lambda m: m.storage_data.update({MetadataIndex("w", (0, 0)): (0, 0)}),
    "place a class": lambda m: m.storage_data.update({MetadataIndex("w", (0, 0)): _StorageInfo}),
    "key a string": lambda m: m.storage_data.update({"w": _place(m)}),
    "key of a numbered name": _rekeyed(fqn=7),
    "key of a tuple": _rekeyed(offset=(0, 0)),
    "key of a text index": _rekeyed(index="0"),
    "path none": _set(_place, "relative_path", 5),
    "path missing": _drop(_place, "relative_path"),
    "path outside": _set(_place, "relative_path", "../x"),
    "path unknown": _set(_place, "relative_path", "elsewhere.safetensors"),
    "offset negative": _set(_place, "offset", -1),
    "offset huge": _set(_place, "offset", HUGE),
    "offset beyond int64": _set(_place, "offset", 1 << 70),
    "offset a float": _set(_place, "offset", 0.5),
    "offset true": _set(_place, "offset", True),
    "length negative": _set(_place, "length", -1),
    "length huge": _set(_place, "length", HUGE),
    "length one more": lambda m: setattr(_place(m), "length", _place(m).length + 1),
    "length text": _set(_place, "length", "1"),
    "transformed": _set(_place, "transform_descriptors", ["zstd"]),
    "transformed by a number": _set(_place, "transform_descriptors", ("zstd", 1)),
    "no note": lambda m: vars(m).pop("dcp_datastates"),
    "note a list": lambda m: vars(m).update(dcp_datastates=[]),
    "note of version text": _note(version="1"),
    "note of version true": _note(version=True),
    "note of version deep": _note(version=[[]]),
    "note of attempt none": _note(attempt=None),
    "note of attempt outside": _note(attempt="../x"),
    "note of files a list": _note(files=[]),
    "file of a numbered name": _file(name=5),
    "file outside": _file(name="../x", sizes=(8, 0)),
    "file absolute": _file(name="/etc/passwd"),
    "file with NUL": _file(name="a\0b"),
    "file sizes one": _file(sizes=(4,)),
    "file sizes text": _file(sizes="ab"),
    "file sizes negative": _file(sizes=(-1, -5)),
    "file sizes huge": _file(sizes=(HUGE * 4, HUGE)),
    "file sizes floats": _file(sizes=(8.0, 0.0)),
    "file without a table": _file(sizes=(4096, 4096)),
    "list of a billion": lambda m: m.planner_data.update({"w": ("w", 1 << 40)}),
    "list from behind": lambda m: m.planner_data.update({"w": ("w", -1)}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_malformed_metadata_is_refused_by_a_load(wrong, checkpoint):
    rewritten(checkpoint, WRONG[wrong])
    with raises(CheckpointCorruptError, ".metadata" if wrong != "length one more" else "'w'"):
        load_everything(checkpoint)
    with raises(CheckpointCorruptError):
        load({"w": torch.zeros(300, 20)}, checkpoint)


def test_an_object_of_a_length_that_is_not_there_is_refused(checkpoint):
    """Its data file is cut away: the metadata promise 1 TiB, and no buffer of that size is made."""

    def promise(metadata):
        files = vars(metadata)["dcp_datastates"]["files"]
        (name,) = files
        table = 1 << 40
        files[name] = (table + 4 * ((table >> 20) + 1), table)
        place = metadata.storage_data[MetadataIndex("object.text")]
        place.length = table - place.offset

    rewritten(checkpoint, promise)
    with raises(CheckpointCorruptError, "bytes"):
        load_everything(checkpoint)


# --- what must still open ----------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("flatten", [True, False])
def test_every_protocol_and_both_forms_of_state_open(protocol, flatten, tmp_path):
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
    written = io.BytesIO()
    found = pickle.loads(body_of(tmp_path))
    if protocol < 3:  # what newer torches add is noted as bytes, which need protocol 3
        found.dcp_datastates.pop("properties", None)
    metadata_pickler(written, protocol).dump(found)
    body = written.getvalue()
    assert scan_pickle(body) is None
    (tmp_path / ".metadata").write_bytes(with_trailer(body))
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
    "nested": {"a": [(1, 2.5), None, True, "b", b"c", -(1 << 40), 1 << 90, {1, 2}, frozenset("x")]},
    "ordered": OrderedDict(a=1, b=[2]),
    "shared": [SHARED, SHARED, {"a": SHARED}],
    "keyed": {(0, "a"): 1, 5: 2, None: 3, 1.5: 4, b"x": 5},
    "torch": [torch.float32, torch.strided, torch.Size((1, 2))],
    "shapes": {f"w{number}": (number, 11008) for number in range(3000)},
}


@pytest.mark.parametrize("note", NOTES)
def test_plain_data_of_a_planner_open(note, tmp_path):
    planner = _NotingPlanner()
    planner.note = NOTES[note]
    save({"w": torch.ones(3)}, tmp_path, planner=planner)
    metadata = decode((tmp_path / ".metadata").read_bytes(), tmp_path)
    assert metadata.planner_data["mine"] == NOTES[note]


def _deep():
    value: list = []
    for _ in range(300):
        value = [value]
    return value


def _cycle():
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "note", [object(), Path("x"), _deep(), _cycle()], ids=["object", "path", "deep", "cycle"]
)
def test_what_could_not_be_opened_again_is_refused_by_the_save(note, tmp_path):
    planner = _NotingPlanner()
    planner.note = note
    with raises(ConfigurationError, "planner_data"):
        save({"w": torch.ones(3)}, tmp_path / "c", planner=planner)
    assert not (tmp_path / "c" / ".metadata").exists()
