"""The files, seen with eyes that are not the package's own: safetensors, torch, and plain Python."""

import struct

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from support.state.checkpoints import assert_same, attempts, bits, save, zeros
from support.state.files import BLOCK, crc32c, data_files, read_file
from support.state.states import DTYPES, filled
from torch.distributed.checkpoint import HuggingFaceStorageReader

NAMED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
}
UNNAMED = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex128]


def _state():
    state = {str(dtype): filled((13, 5), dtype, n) for n, dtype in enumerate(DTYPES)}
    state["big"] = filled((1_500_000,), torch.float32, 77)
    state["empty"] = torch.empty(0, 3)
    state["scalar"] = filled((), torch.float64, 78)
    return state


def test_safetensors_opens_each_file_and_finds_what_was_saved(tmp_path):
    state = _state()
    save({**state, "object": {"a": (1, 2)}}, tmp_path)
    found = {}
    for path in data_files(tmp_path):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                assert key not in found
                found[key] = file.get_tensor(key)
    for name, tensor in state.items():
        if tensor.dtype in NAMED:
            assert_same(found[name], tensor, name)
        else:
            assert bits(found[name]) == bits(tensor), name


@pytest.mark.parametrize("dtype", UNNAMED, ids=str)
def test_what_safetensors_cannot_name_is_bytes_with_its_dtype_noted(dtype, tmp_path):
    tensor = filled((6, 5), dtype)
    save({"odd": tensor}, tmp_path)
    file = read_file(data_files(tmp_path)[0])
    assert file.header["odd"]["dtype"] == "U8"
    assert file.content("odd") == bits(tensor)
    assert any(str(dtype) in note for note in file.metadata.values())


@pytest.mark.parametrize("elements", [1, 300_000, 1_000_003])
def test_the_checksum_table_is_that_of_an_independent_crc32c(elements, tmp_path):
    assert crc32c(b"123456789") == 0xE3069283  # the check value of RFC 3720's polynomial
    save({"w": filled((elements,), torch.uint8), "object": "x" * 1001}, tmp_path)
    (path,) = data_files(tmp_path)
    file = read_file(path)
    tables = [key for key, entry in file.header.items() if entry["dtype"] == "U32"]
    assert len(tables) == 1
    begin, end = file.span(tables[0])
    assert end == len(file.raw), "the table is the last thing in the file"
    words = struct.unpack(f"<{(end - begin) // 4}I", file.raw[begin:end])
    covered = [file.raw[start : min(start + BLOCK, begin)] for start in range(0, begin, BLOCK)]
    assert list(words[:-1]) == [crc32c(block) for block in covered]
    assert words[-1] == crc32c(file.raw[begin : end - 4])


def test_the_files_are_where_they_should_be_and_nothing_else_is(tmp_path):
    save({"w": torch.ones(3)}, tmp_path)
    (attempt,) = attempts(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".metadata", attempt.name]
    assert sorted(entry.name for entry in attempt.iterdir()) == ["decision", "r00000-0.safetensors"]


def test_the_hugging_face_reader_loads_the_attempt(tmp_path):
    hugging_face_knows = {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    }
    state = {
        str(dtype): filled((13, 5), dtype, n)
        for n, dtype in enumerate(DTYPES)
        if dtype in hugging_face_knows
    }
    state["empty"] = torch.empty(0, 4)
    save({**state, "object": (1, "two")}, tmp_path)
    (attempt,) = attempts(tmp_path)
    target = zeros(state)
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(attempt)), no_dist=True)
    assert_same(target, state)
