"""Files of ``torch.save`` as sources: of every age and packing, whole, damaged or hostile."""

import argparse
import io
import pickle
import re
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.commands import run_cli
from support.state.checkpoints import assert_same
from support.state.states import filled

import dcp_datastates
from dcp_datastates import convert
from dcp_datastates.errors import (
    CheckpointCorruptError,
    ForeignCheckpointError,
    IncompatibleStateError,
    UnsafeObjectError,
    UnsupportedTensorError,
)

from .conftest import SMALL, Trap, refused


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_torch_file_that_another_program_has_packed(packing, tmp_path):
    """Its tensors lie elsewhere than in a file of torch, which reads it; compressed, they cannot be mapped."""
    torch.save({"a": torch.arange(100.0), "b": torch.ones(9)}, tmp_path / "first")
    with (
        zipfile.ZipFile(tmp_path / "first") as old,
        zipfile.ZipFile(tmp_path / "in", "w", packing) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    expected = {"a": torch.arange(100.0), "b": torch.ones(9)}
    assert_same(torch.load(tmp_path / "in"), expected)
    if packing == zipfile.ZIP_STORED:
        convert(tmp_path / "in", tmp_path / "out", "safetensors", **SMALL)
        assert_same(load_file(tmp_path / "out"), expected)
        return
    refused(tmp_path / "in", IncompatibleStateError, "another program has packed", tmp_path)
    assert run_cli("convert", tmp_path / "in", tmp_path / "out").returncode == 2, (
        "it is not damaged"
    )


def _script(path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


def _quantized(path):
    torch.save(
        {"a": torch.ones(3), "q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)},
        path,
    )


def _enum(path):
    torch.save({"a": torch.ones(3), "flags": re.IGNORECASE}, path)


def _nameless(path):
    torch.save({"a": torch.ones(3), "": torch.ones(1)}, path)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (_script, ForeignCheckpointError, r"TorchScript.*torch\.jit\.load"),
        (_quantized, UnsupportedTensorError, r"quantized.*dequantize\(\)"),
        (_enum, UnsafeObjectError, r"make its values plain.*allow_objects=True"),
        (_nameless, IncompatibleStateError, "empty key"),
    ],
)
def test_a_whole_torch_file_is_not_called_damaged(make, kind, words, tmp_path):
    make(tmp_path / "in")
    refused(tmp_path / "in", kind, words, tmp_path)
    assert run_cli("convert", tmp_path / "in", tmp_path / "out").returncode == 2


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.complex64).conj().imag,
        torch.ones(3).to_sparse(),
        torch.zeros(1).expand(1 << 50),
        torch.ones(3, device="meta"),
    ],
    ids=["conj", "neg", "sparse", "expanded", "meta"],
)
def test_a_tensor_that_cannot_be_converted_can_be_excluded(value, tmp_path):
    torch.save({"a": torch.arange(3.0), "b": value}, tmp_path / "in")
    refused(tmp_path / "in", UnsupportedTensorError, "exclude='b'", tmp_path)
    convert(tmp_path / "in", tmp_path / "out", "torch", exclude="b", **SMALL)
    assert_same(torch.load(tmp_path / "out"), {"a": torch.arange(3.0)})


@pytest.mark.parametrize("is_archive", [True, False])
def test_a_torch_file_runs_no_code(is_archive, tmp_path):
    state = {"a": torch.ones(3), "trap": Trap()}
    torch.save(state, tmp_path / "in", _use_new_zipfile_serialization=is_archive)
    error = refused(tmp_path / "in", UnsafeObjectError, "--allow-objects", tmp_path, "torch")
    assert "_spring" in str(error)


def test_objects_of_a_torch_file_that_is_trusted(tmp_path):
    torch.save({"a": torch.ones(3), "args": argparse.Namespace(x=1)}, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", allow_objects=True, **SMALL)
    found = dcp_datastates.load(tmp_path / "out", allow_objects=True)
    assert_same(found, {"a": torch.ones(3), "args": argparse.Namespace(x=1)})


def test_a_torch_file_of_another_byte_order_is_read(tmp_path):
    plain, other = tmp_path / "plain", tmp_path / "other"
    torch.save({"w": torch.arange(3)}, plain)
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(other, "w") as changed:
        for name in archive.namelist():
            data = b"big" if name.endswith("/byteorder") else archive.read(name)
            if "/data/" in name:
                data = np.frombuffer(data, np.int64).byteswap().tobytes()
            changed.writestr(name, data)
    dcp_datastates.convert(other, tmp_path / "out", "safetensors")
    assert_same(load_file(tmp_path / "out"), {"w": torch.arange(3)})


def test_a_torch_file_of_before_torch_1_6_is_read(tmp_path):
    state = {"a": torch.arange(5.0), "nested": {"b": torch.ones(2, dtype=torch.bfloat16)}, "n": 3}
    torch.save(state, tmp_path / "in", _use_new_zipfile_serialization=False)
    convert(tmp_path / "in", tmp_path / "out", **SMALL)
    assert_same(dcp_datastates.load(tmp_path / "out"), state)


def test_a_part_of_a_tensor_does_not_bring_all_of_it(tmp_path):
    base = filled((1 << 16,), torch.float32)
    torch.save({"all": base, "few": base[5:9]}, tmp_path / "in")
    for to in ("torch", "dcp"):
        convert(tmp_path / "in", tmp_path / to, to, only="few", **SMALL)
        assert dcp_datastates.diff(tmp_path / "in", tmp_path / to, only="few").same
    assert (tmp_path / "torch").stat().st_size < 10_000
    assert (tmp_path / "dcp" / "__0_0.distcp").stat().st_size < 10_000


@pytest.mark.parametrize(
    "body",
    [b"()" + b"\x85" * 1_000_000 + b"K\x01u.", b"K\x01" + b"]" * 99_999 + b"a" * 99_998 + b"u."],
)
@pytest.mark.parametrize("is_archive", [True, False])
def test_a_torch_file_that_nests_deeply_does_not_end_the_process(body, is_archive, tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "in", _use_new_zipfile_serialization=is_archive)
    data = (tmp_path / "in").read_bytes()
    hostile = b"\x80\x02}" + (body if body[:1] == b"(" else b"(" + body)
    if is_archive:
        with (
            zipfile.ZipFile(io.BytesIO(data)) as good,
            zipfile.ZipFile(tmp_path / "in", "w") as bad,
        ):
            for name in good.namelist():
                bad.writestr(name, hostile if name.endswith("/data.pkl") else good.read(name))
    else:
        at = data.index(b"\x80\x02}q\x00X\x01\x00\x00\x00w")
        (tmp_path / "in").write_bytes(data[:at] + hostile + pickle.dumps([], 2))
    ended = run_cli("convert", tmp_path / "in", tmp_path / "out")
    assert ended.returncode in (1, 2), ended.stderr
    assert "too deeply" in ended.stderr


def test_a_torch_file_with_a_name_that_is_no_text(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "in")
    data = (tmp_path / "in").read_bytes()
    (tmp_path / "in").write_bytes(data.replace(b"/byteorder", b"/\xff\xfeteorder"))
    refused(tmp_path / "in", CheckpointCorruptError, "torch cannot read it", tmp_path)
