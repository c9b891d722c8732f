"""The memory of a conversion is that of the tensors that threads hold; but for ``torch.save``."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.tiers import sampled

import dcp_datastates
from dcp_datastates import convert, diff
from dcp_datastates.conversion.convert import open_source

MIB = 1 << 20
COUNT, NBYTES = 5, 36 * MIB
"""Tensors of 180 MiB. The allocator returns to the system what is larger than 32 MiB; it may keep what is smaller."""
MORE = 24 * MIB
"""Bytes of files on their way to storage, and what is compared."""


def _write_source(path, nbytes):
    """A file of tensors of ``nbytes`` each, with holes, which take no space, and a value at each end."""
    ends = range(0, (COUNT + 1) * nbytes, nbytes)
    entries = {
        f"w{n}": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [*ends[n : n + 2]]}
        for n in range(COUNT)
    }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        file.truncate(start + COUNT * nbytes)
        for at in (0, COUNT * nbytes - 4):
            file.seek(start + at)
            file.write(torch.ones(1).numpy().tobytes())
    return path


@pytest.fixture
def source(tmp_path):
    # What a process needs once, and is not counted: the engine, and what torch imports at first use.
    torch.save({"a": torch.ones(3)}, tmp_path / "small")
    convert(tmp_path / "small", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "torch", "torch")
    convert(tmp_path / "torch", tmp_path / "ours")
    return _write_source(tmp_path / "in.safetensors", NBYTES)


def _own_bytes():
    """The process's memory without pages of mapped files, which the system takes back when it needs memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


def _most(call):
    """The most memory beyond what there was before."""
    before = most = _own_bytes()
    over = threading.Event()

    def watch():
        nonlocal most
        while not over.wait(0.001):
            most = max(most, _own_bytes())

    with ThreadPoolExecutor(1) as executor:
        watching = executor.submit(watch)
        try:
            call()
        finally:
            over.set()
        watching.result()
    return most - before


@pytest.mark.parametrize("to", sampled(["datastates", "hf", "dcp"], keep=["datastates", "dcp"]))
def test_memory_is_one_tensor_for_each_thread(to, source, tmp_path):
    out = tmp_path / "out"
    assert _most(lambda: convert(source, out, to, threads=1)) < NBYTES + MORE
    assert len(open_source(out).tensors) == COUNT
    assert diff(source, out, threads=1).same
    assert _most(lambda: diff(source, out, threads=1)) < 2 * NBYTES + 2 * MORE
    assert (
        _most(lambda: convert(out, tmp_path / "back", "safetensors", threads=1)) < 2 * NBYTES + MORE
    )


def test_memory_with_another_dtype(source, tmp_path):
    """The tensors of half the size are as large as the others, so that the allocator returns them as well."""
    out = tmp_path / "out"
    _write_source(source, 2 * NBYTES)
    assert _most(lambda: convert(source, out, dtype="bfloat16", threads=1)) < NBYTES + MORE
    found = dcp_datastates.load(out)
    assert found["w0"][0] == found[f"w{COUNT - 1}"][-1] == 1
    assert sum(int(each.count_nonzero()) for each in found.values()) == 2
