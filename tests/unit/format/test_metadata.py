"""The table behind the pickle in ``.metadata``: its bytes by other code than the package's, and what is refused."""

import json
import re
import struct
from pathlib import Path

import pytest
from support.state.checkpoints import assert_same, load_everything, raises
from support.state.metadata import (
    COLUMNS,
    decision_of,
    ended,
    file_of,
    parts_of,
    rewritten,
    with_format,
)

from dcp_datastates.errors import CheckpointCorruptError, UnreadableMetadataError
from dcp_datastates.format.metadata import decode, parse

PATH = Path("c/.metadata")
HUGE = 1 << 62


def test_a_file_is_what_the_layout_says(checkpoint, state):
    """By other code than the package's."""
    data = decision_of(checkpoint).read_bytes()
    parts = parts_of(checkpoint)
    assert data.startswith(b"\x80\x04")
    assert parts.pickled.endswith(b".")
    assert set(parts.document) == {
        *("attempt", "after", "files", "names", "properties"),
        *("planner_data", "metrics", "published_at", "trace", "compared"),
    }
    assert sorted(parts.document["names"]) == ["list.0", "list.1.deep", "object.text", "w"]
    assert parts.document["planner_data"]["tuples"]["list.1.deep"] == ["list", 1, "deep"]
    place = parts.place("w")
    assert parts.columns["lengths"][place] == 300 * 20 * 4
    assert file_of(parts)[: len(parts.pickled)] == data[: len(parts.pickled)]
    rewritten(checkpoint, lambda parts: None)
    assert_same(load_everything(checkpoint), state)


def test_another_format_is_refused_by_name_with_the_way_out(checkpoint):
    file = decision_of(checkpoint)
    other = with_format(file.read_bytes(), 3)
    file.write_bytes(other)
    with raises(UnreadableMetadataError, str(file), "format 3", "upgrade"):
        load_everything(checkpoint)
    for at in range(len(other) - 24, len(other)):  # what is damaged is not taken for another format
        broken = bytearray(other)
        broken[at] ^= 1
        with pytest.raises(CheckpointCorruptError, match=re.escape(str(file))) as raised:
            decode(bytes(broken), file)
        assert type(raised.value) is CheckpointCorruptError


def _split(data):
    """All before the directory, where the columns begin, and the directory."""
    count = 1 + len(COLUMNS)
    directory = data[-24 - 9 * count : -24]
    (pickle_bytes,) = struct.unpack_from("<Q", data, len(data) - 16)
    return data[: -24 - len(directory)], pickle_bytes, list(struct.iter_unpack("<BQ", directory))


def _with_directory(data, entries):
    before, pickle_bytes, _ = _split(data)
    return ended(before + b"".join(struct.pack("<BQ", *entry) for entry in entries), pickle_bytes)


def test_directories_that_do_not_fit_the_file_are_refused(checkpoint):
    data = decision_of(checkpoint).read_bytes()
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
    for count in (0, 1, 9, 11, (1 << 32) - 1):
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
    data = decision_of(checkpoint).read_bytes()
    expected = parse(data, PATH)[1]
    wide = file_of(parts_of(checkpoint))
    assert len(wide) > len(data)
    found = parse(wide, PATH)[1]
    assert {name: column.tolist() for name, column in found.items()} == {
        name: column.tolist() for name, column in expected.items()
    }
