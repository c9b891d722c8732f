"""Readers of bytes from outside get anything at all: this package's errors, soon, or nothing."""

import contextlib
import json
import os
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.state.checkpoints import causes, load_everything, raises, save
from support.state.files import data_files, mutated, read_file
from support.state.metadata import (
    COLUMNS,
    decision_of,
    ended,
    file_of,
    parts_of,
    process_wide,
)
from support.state.states import filled
from support.tiers import tries
from support.waiting import little_work

import dcp_datastates
from dcp_datastates.errors import (
    CheckpointCorruptError,
    ConfigurationError,
    DataStatesError,
    UnreadableMetadataError,
)
from dcp_datastates.format import values
from dcp_datastates.format.metadata import decode, encode
from dcp_datastates.format.metadata_objects import metadata_of
from dcp_datastates.format.safetensors_header import read_header

SEED = int(os.environ.get("FUZZ_SEED", "20241121"))
SECONDS_PER_TRY = 2.0
PATH = Path("c/.metadata")

FUZZ = settings(
    max_examples=400,
    deadline=2000,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz")
    state = {
        "w": filled((64, 3), torch.float32, 1),
        "list": [filled((5,), torch.uint8, 2), {"deep": filled((), torch.bfloat16, 3)}],
        "empty": torch.zeros(0, 2),
    }
    save(state, path)
    return path


@pytest.fixture(autouse=True)
def _nothing_shared_changes():
    before = process_wide()
    yield
    assert process_wide() == before


def _decoded(data):
    """What the reader makes of ``data`` (None: refused), for reasons that are not lack of memory or stack."""
    with little_work(SECONDS_PER_TRY):
        cause = None
        try:
            found = decode(data, PATH)
        except CheckpointCorruptError as error:
            found, cause = None, error
        while cause is not None:
            assert not isinstance(cause, (MemoryError, RecursionError)), cause
            cause = cause.__cause__
        if found is not None:
            for entry in metadata_of(found).state_dict_metadata.values():
                repr(entry)
            at = found.placement
            for file, begin, length in zip(at.files, at.begins, at.lengths, strict=True):
                record = found.note.files[at.paths[file]]
                assert 0 <= begin <= begin + length <= record.table_offset
    return found


# --- metadata --------------------------------------------------------------------------------------


@FUZZ
@given(st.binary(max_size=200))
def test_random_bytes_as_metadata(data):
    assert _decoded(data) is None
    assert _decoded(ended(data, 0)) is None
    assert _decoded(ended(data, len(data))) is None


WILD = (
    *(0, 1, 2, 5, 63, 64, 65, 255, 256, 4096),
    *(1 << power for power in (16, 31, 32, 40, 61, 62)),
)


def _changed(parts, chance):
    """A file that is whole, and like ``parts`` but for one to three changes."""
    data = file_of(parts)
    count = 1 + len(COLUMNS)
    how = chance.randrange(4)
    if how == 0:  # anywhere in the table, directory and all
        before = mutated(data[:-24], chance)
        return ended(before, chance.choice((0, 0, 0, chance.randrange(len(before) + 2))))
    if how == 1:  # in the directory
        at = len(data) - 24 - 9 * count
        return ended(data[:at] + mutated(data[at:-24], chance), 0)
    changed = replace(parts, columns={name: list(values) for name, values in parts.columns.items()})
    if how == 2:
        changed.document = mutated(json.dumps(parts.document).encode(), chance)
        return file_of(changed)
    for _ in range(chance.randint(1, 3)):
        values = changed.columns[chance.choice(COLUMNS)]
        at = chance.randrange(len(values) + 1)
        value = chance.choice((*WILD, *values)) * chance.choice((1, 1, 1, -1)) + chance.choice(
            (0, 0, 1, -1)
        )
        if at == len(values) or chance.random() < 0.1:
            values.insert(at, value)
        elif chance.random() < 0.1:
            del values[at]
        else:
            values[at] = value
    return file_of(changed)


def _parts(checkpoint):
    """Without the pickle, which is not read."""
    return replace(parts_of(checkpoint), pickled=b"")


@pytest.mark.parametrize("mutations", tries(1000, 10_000))
def test_changed_metadata_with_good_checksums(mutations, checkpoint):
    parts = _parts(checkpoint)
    assert _decoded(file_of(parts)) is not None
    chance = random.Random(SEED)
    with _memory(32 << 20):
        opened = sum(_decoded(_changed(parts, chance)) is not None for _ in range(mutations))
    print(f"seed {SEED}: {mutations} changes, {opened} opened")
    assert opened > mutations // 100


@pytest.mark.parametrize("wanted", tries(60, 600))
def test_changed_metadata_are_loaded_or_refused(wanted, checkpoint):
    """What opens after a change is loaded: other numbers, but nothing but this package's errors from it."""
    path = decision_of(checkpoint)
    good, parts = path.read_bytes(), _parts(checkpoint)
    chance = random.Random(SEED + 1)
    loads = tries = 0
    try:
        while loads < wanted and tries < 40 * wanted:
            tries += 1
            data = _changed(parts, chance)
            if _decoded(data) is None:
                continue
            loads += 1
            path.write_bytes(data)
            try:
                with little_work(SECONDS_PER_TRY):
                    load_everything(checkpoint)
            except AssertionError:
                raise
            except BaseException as error:
                for cause in causes(error):
                    assert isinstance(cause, DataStatesError) or _is_of_dcp(cause), repr(cause)
    finally:
        path.write_bytes(good)
    print(f"seed {SEED + 1}: {loads} loads of {tries} changes")
    assert loads >= wanted // 4


def _is_of_dcp(error):
    """Whether DCP's planner found that what was asked for is not in the metadata (a mutated name)."""
    trace = error.__traceback__
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    ours = str(Path(dcp_datastates.__file__).parent)
    return bool(frames) and not any(frame.startswith(ours) for frame in frames)


LARGE = 1 << 21
LISTS = b"[" + b"[]," * (LARGE // 3) + b"[]]"
DICTS = b"[" + b'{"":0},' * (LARGE // 7) + b"[]]"


def _with_unknown(parts, value):
    return replace(
        parts, document=json.dumps(parts.document).encode()[:-1] + b',"x":' + value + b"}"
    )


def _of_empty_chunks(parts):
    """One tensor of as many chunks as bytes: nothing in it is wrong, but for its size."""
    many = [0] * (LARGE // 5)
    columns = dict.fromkeys(COLUMNS, many) | {"properties": [0], "ndims": [1]}
    document = parts.document | {"names": ["w"], "planner_data": None}
    return replace(
        parts, document=document, columns=columns | {"shapes": [7], "counts": [len(many)]}
    )


AMPLIFIED = {
    "lists": lambda parts: _with_unknown(parts, LISTS),
    "dicts": lambda parts: _with_unknown(parts, DICTS),
    "a column": lambda parts: replace(parts, columns=parts.columns | {"offsets": [0] * LARGE}),
    "chunks": _of_empty_chunks,
}


@contextlib.contextmanager
def _memory(most):
    """The block has at most so many bytes at a time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= most, f"{peak} bytes, of which {most} are allowed"


@pytest.mark.parametrize("amplified", AMPLIFIED)
def test_metadata_take_four_times_their_bytes_at_most(amplified, checkpoint, monkeypatch):
    monkeypatch.setattr(values, "_SPARE_BYTES", 0)
    data = file_of(AMPLIFIED[amplified](_parts(checkpoint)))
    with _memory(4 * len(data)), raises(UnreadableMetadataError, "bytes in memory"):
        decode(data, PATH)


def test_metadata_that_could_not_be_read_are_not_written(checkpoint, monkeypatch):
    table = decode(file_of(_parts(checkpoint)), PATH)
    monkeypatch.setattr(values, "_SPARE_BYTES", -1 << 20)
    with raises(ConfigurationError, "bytes in memory"):
        encode(table)


@pytest.mark.parametrize("value", [LISTS, DICTS], ids=["lists", "dicts"])
def test_a_header_takes_four_times_its_bytes_at_most(value, monkeypatch):
    monkeypatch.setattr(values, "_SPARE_BYTES", 0)
    data = _header_of(b'{"a":' + value + b"}")
    with _memory(4 * len(data)), raises(CheckpointCorruptError, "bytes in memory"):
        read_header(data, len(data))


# --- safetensors headers ------------------------------------------------------------------------------


def _header_of(text, data=0):
    return len(text).to_bytes(8, "little") + text + bytes(data)


def _read(data, file_size=None):
    size = len(data) if file_size is None else file_size
    with little_work(SECONDS_PER_TRY):
        try:
            header = read_header(data, size)
        except CheckpointCorruptError:
            return None
    ends = [entry.data_offsets[1] for entry in header.entries]
    assert header.data_start + max(ends, default=0) == size
    return header


def test_a_header_of_this_package_is_read(checkpoint):
    (path,) = data_files(checkpoint)
    file = read_file(path)
    data = path.read_bytes()
    header = read_header(data, len(data))
    assert header == read_header(data[: header.data_start], len(data))
    assert {entry.name: list(entry.data_offsets) for entry in header.entries} == {
        name: entry["data_offsets"] for name, entry in file.header.items()
    }
    assert header.metadata == file.metadata
    assert header.data_start == file.data_start


A = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
BAD_HEADERS = {
    "nothing": (b"", "too short"),
    "seven bytes": (b"\0" * 7, "too short"),
    "no header": (bytes(8), "'{'"),
    "huge length": (b"\xff" * 8 + A, "100000000"),
    "length beyond the file": (_header_of(A)[:-1], "the file has"),
    "no JSON": (_header_of(b"{]"), "JSON"),
    "two": (_header_of(b"{}{}"), "JSON"),
    "a list": (_header_of(b"[]"), "'{'"),
    "a name twice": (_header_of(A[:-1] + b"," + A[1:], 4), "twice"),
    "a field twice": (_header_of(A.replace(b'"shape"', b'"dtype":"U8","shape"'), 4), "twice"),
    "deep": (_header_of(b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"), "deep"),
    "deep objects": (_header_of(b'{"a":' * 300_000 + b"1" + b"}" * 300_000), "deep"),
    "a float": (_header_of(A.replace(b"[4]", b"[4.0]"), 4), "no integer"),
    "an exponent": (_header_of(A.replace(b"[4]", b"[4e999999999]"), 4), "no integer"),
    "NaN": (_header_of(A.replace(b"[4]", b"[NaN]"), 4), "no integer"),
    "a surrogate": (_header_of(A.replace(b'"a"', rb'"\ud800"'), 4), "Unicode"),
    "metadata a list": (_header_of(b'{"__metadata__":[]}'), "__metadata__"),
    "metadata of numbers": (_header_of(b'{"__metadata__":{"a":1}}'), "__metadata__"),
    "entry a list": (_header_of(b'{"a":[]}'), "described"),
    "entry without a dtype": (
        _header_of(b'{"a":{"shape":[],"data_offsets":[0,1]}}', 1),
        "described",
    ),
    "unknown dtype": (_header_of(A.replace(b"U8", b"U9"), 4), "dtype"),
    "dtype a list": (_header_of(A.replace(b'"U8"', b"[]"), 4), "dtype"),
    "shape negative": (_header_of(A.replace(b"[4]", b"[-4]"), 4), "shape"),
    "shape true": (_header_of(A.replace(b"[4]", b"[true]"), 4), "shape"),
    "shape null": (_header_of(A.replace(b"[4]", b"null"), 4), "shape"),
    "shape overflow": (_header_of(A.replace(b"[4]", b"[9223372036854775807,3]"), 4), "larger"),
    "shape overflow to 4": (
        _header_of(A.replace(b"[4]", b"[4611686018427387905,4]"), 4),
        "larger",
    ),
    "shape overflow with 0": (
        _header_of(A.replace(b"[4]", b"[9223372036854775807,9223372036854775807,0]"), 4),
        "larger",
    ),
    "shape of many": (_header_of(A.replace(b"[4]", b"[4" + b",1" * 99 + b"]"), 4), "shape"),
    "wrong size": (_header_of(A.replace(b"[4]", b"[5]"), 4), "bits"),
    "backwards": (_header_of(A.replace(b"[0,4]", b"[4,0]"), 4), "bits"),
    "one offset": (_header_of(A.replace(b"[0,4]", b"[4]"), 4), "data_offsets"),
    "a gap": (_header_of(A.replace(b"[0,4]", b"[1,5]"), 5), "begins"),
    "overlap": (_header_of(A[:-1] + b"," + A[1:].replace(b'"a"', b'"b"'), 4), "begins"),
    "cut": (_header_of(A, 3), "end"),
    "grown": (_header_of(A, 5), "end"),
}


@pytest.mark.parametrize("bad", BAD_HEADERS)
def test_a_malformed_header_is_refused_with_the_reason(bad):
    data, reason = BAD_HEADERS[bad]
    with raises(CheckpointCorruptError, reason):
        read_header(data, len(data))


def test_mutated_headers(checkpoint):
    (path,) = data_files(checkpoint)
    raw = path.read_bytes()
    text = raw[8 : read_file(path).data_start].rstrip()
    data = len(raw) - read_file(path).data_start
    chance = random.Random(SEED + 4)
    opened = 0
    for number in range(4000):
        changed = mutated(text, chance)
        if number % 4:
            opened += _read(_header_of(changed, data)) is not None
        else:
            opened += _read(mutated(raw[:600], chance), len(raw)) is not None
    print(f"seed {SEED + 4}: 4000 headers, {opened} opened")
    assert opened > 0


@FUZZ
@given(st.binary(max_size=100), st.none() | st.integers(0, 1 << 64))
def test_random_bytes_as_a_header(data, file_size):
    _read(data, file_size)
    _read(_header_of(b"{" + data))
