"""The memory of a conversion is bounded by ``host_cache_size``, whatever the tensors; but for ``torch.save``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.state.checkpoints import assert_same
from support.tiers import sampled

import dcp_datastates
from dcp_datastates import convert, diff
from dcp_datastates.conversion.open import open_source
from dcp_datastates.format.layout import SAFETENSORS_NAME

MIB = 1 << 20
ROWS, COLUMNS = 48, MIB
"""A tensor of 192 MiB, with rows of 4 MiB."""


@pytest.fixture
def source(tmp_path):
    """A file with holes, which takes no space, and a value at each end."""
    path = tmp_path / "in.safetensors"
    nbytes = ROWS * COLUMNS * 4
    header = (
        f'{{"a":{{"dtype":"{SAFETENSORS_NAME[torch.float32]}","shape":[{ROWS},{COLUMNS}],'
        f'"data_offsets":[0,{nbytes}]}}}}'
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        file.truncate(start + nbytes)
        for at in (0, nbytes - 4):
            file.seek(start + at)
            file.write(torch.ones(1).numpy().tobytes())
    # What a process needs once, and is not counted: the engine, and what torch imports at first use.
    torch.save({"a": torch.ones(3)}, tmp_path / "small")
    convert(tmp_path / "small", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "torch", "torch")
    convert(tmp_path / "torch", tmp_path / "ours")
    return path


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def _now() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
    return _peak()


@pytest.mark.parametrize("to", sampled(["datastates", "hf", "dcp"], keep=["datastates", "dcp"]))
def test_memory_is_a_part_of_the_tensor(to, source, tmp_path):
    before = _now()
    convert(source, tmp_path / "out", to, host_cache_size="32MiB", threads=4)
    assert _peak() - before < 40 * MIB, "of 192 MiB"
    assert open_source(tmp_path / "out").tensors["a"].shape == (ROWS, COLUMNS)
    before = _now()
    assert diff(source, tmp_path / "out", threads=2).same
    assert _peak() - before < 96 * MIB


def test_memory_with_another_dtype(source, tmp_path):
    before = _now()
    convert(source, tmp_path / "out", dtype="bfloat16", host_cache_size="32MiB", threads=4)
    assert _peak() - before < 40 * MIB
    found = dcp_datastates.load(tmp_path / "out")["a"]
    expected = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    expected[0, 0] = expected[-1, -1] = 1
    assert_same(found, expected)
