"""Deltas: each version is what has changed since the one before, in the format that slime writes and SGLang reads."""

from __future__ import annotations

import json
import sys
import zlib

import numpy as np
import pytest
import torch
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file
from support.crashes.failing import armed
from support.state.files import flip_bit
from support.state.loops import Loop, manager

from dcp_datastates import Weights, follow
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
)
from dcp_datastates.weights import version

INDEX = "model.safetensors.index.json"


def run(path, steps, frozen=False, **options):
    """Publishes each of ``steps``; returns what was published, in bfloat16, by step."""
    loop, held = Loop(), {}
    if frozen:
        loop.model[0].requires_grad_(False)
    rules = Weights(path / "w", dtype="bfloat16", delta="xor", keep=None)
    with manager(path / "run", publish=Weights(**{**vars(rules), **options})) as saves:
        saves.restore_latest(loop.state)
        for step in steps:
            held[step] = {n: each.bfloat16() for n, each in loop.model.state_dict().items()}
            saves.save(step, loop.state)
            saves.wait()
            loop.step()
    return held


def kinds(path):
    """For each version whether it is a delta."""
    return [version.is_delta(path / "w", n) for n in version.numbers_below(path / "w")]


def assert_followed(path, held, **options):
    seen = []
    for each in follow(path / "w", timeout=0, **options):
        found = each.read()
        assert found.keys() == held[each.step].keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in held[each.step].items())
        seen.append(each.step)
    return seen


def metadata(path, number):
    return json.loads((path / "w" / f"weight_v{number:06d}" / INDEX).read_text())["metadata"]


def test_versions_are_equal_whether_full_or_deltas(tmp_path):
    held = run(tmp_path, range(7), full_every=3)
    assert kinds(tmp_path) == [False, True, True, False, True, True, False]
    assert assert_followed(tmp_path, held) == list(range(7))
    assert assert_followed(tmp_path, held, newest=True) == [6]
    assert assert_followed(tmp_path, held, after=4) == [4, 5, 6]  # begins within a chain


def test_another_reader_applies_the_deltas_by_their_format_alone(tmp_path):
    """Written from the format: raw bytes of a full version, then each frame, in order, checked by adler32."""
    held = run(tmp_path, range(4), full_every=9)
    folders = [tmp_path / "w" / f"weight_v{number:06d}" for number in range(1, 5)]
    full = {
        name: each
        for file in folders[0].glob("*.safetensors")
        for name, each in load_file(file).items()
    }
    state = {name: each.flatten().view(torch.uint8).numpy().copy() for name, each in full.items()}
    for number, folder in enumerate(folders[1:], 2):
        index = json.loads((folder / INDEX).read_text())
        assert (
            index["metadata"].items()
            >= {
                "version": f"{number:06d}",
                "base_version": f"{number - 1:06d}",
                "delta_encoding": "xor",
                "compression_format": "zstd",
                "checksum_format": "adler32",
            }.items()
        )
        assert set(map(type, index["metadata"].values())) == {str}
        for file in set(index["weight_map"].values()):
            with safe_open(folder / file, "np") as opened:
                sums = opened.metadata()
                inside = {name for name, each in index["weight_map"].items() if each == file}
                assert set(opened.keys()) == set(sums) == inside
                for name in inside:
                    frame = opened.get_tensor(name)
                    assert frame.dtype == np.uint8
                    assert frame.ndim == 1
                    changed = zstandard.ZstdDecompressor().decompress(frame.tobytes())
                    state[name] ^= np.frombuffer(changed, np.uint8)
                    assert f"{zlib.adler32(state[name]):08x}" == sums[name]
    for name, tensor in held[3].items():
        assert state[name].tobytes() == tensor.flatten().view(torch.uint8).numpy().tobytes()


def test_what_has_not_changed_is_not_written(tmp_path):
    run(tmp_path, range(2), frozen=True)
    index = json.loads((tmp_path / "w" / "weight_v000002" / INDEX).read_text())
    assert sorted(index["weight_map"]) == ["2.bias", "2.weight"]
    assert sorted(index["checksums"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_where_nothing_has_changed_a_version_has_an_index_alone(tmp_path):
    loop = Loop()
    with manager(tmp_path / "run", publish=Weights(tmp_path / "w", delta="xor")) as saves:
        for step in range(2):
            saves.save(step, loop.state)
            saves.wait()
    assert sorted(each.name for each in (tmp_path / "w" / "weight_v000002").iterdir()) == [
        "claim",
        INDEX,
    ]
    assert [len(each.read()) for each in follow(tmp_path / "w", timeout=0)] == [4, 4]


def test_a_restart_and_a_failed_version_are_followed_by_a_full_one(tmp_path):
    held = run(tmp_path, range(2))
    held |= run(tmp_path, range(2, 4))
    assert kinds(tmp_path) == [False, True, False, True]
    with armed("weights.publish.before@1=error:EIO"):
        held |= run(tmp_path, range(4, 7))
    assert kinds(tmp_path) == [False, True, False, True, False, True]
    assert metadata(tmp_path, 6)["step"] == "5"
    assert assert_followed(tmp_path, held) == [0, 1, 2, 3, 5, 6]


def test_what_is_kept_begins_with_a_full_version(tmp_path):
    held = run(tmp_path, range(6), full_every=4, keep=2)
    assert version.numbers_below(tmp_path / "w") == [5, 6]
    assert kinds(tmp_path) == [False, True]
    run(tmp_path / "next", range(4), full_every=9, keep=2)
    assert version.numbers_below(tmp_path / "next" / "w") == [1, 2, 3, 4]
    assert assert_followed(tmp_path, held) == [4, 5]


@pytest.mark.parametrize("damage", ["frame", "full", "base"])
def test_damage_and_a_missing_base_are_told(damage, tmp_path):
    run(tmp_path, range(3))
    newest = next(follow(tmp_path / "w", newest=True))
    if damage == "base":
        version.remove(tmp_path / "w", [2])
        with pytest.raises(CheckpointNotFoundError, match="weight_v000002"):
            newest.read()
        return
    folder = tmp_path / "w" / ("weight_v000001" if damage == "full" else "weight_v000003")
    (file,) = folder.glob("*.safetensors")
    flip_bit(file, file.stat().st_size - 9)
    with pytest.raises(CheckpointCorruptError, match=folder.name):
        newest.read()
    if damage == "frame":  # what is good before it can still be read
        assert [
            each.number
            for each in follow(tmp_path / "w", timeout=0)
            if each.number < 3 and each.read()
        ] == [1, 2]


@pytest.mark.parametrize("nbytes", [3, 1 << 40])
def test_a_delta_of_another_size_is_refused_before_memory_is_taken(nbytes, tmp_path):
    held = run(tmp_path, range(2))[0]
    name = min(held)
    folder = tmp_path / "w" / "weight_v000002"
    index = json.loads((folder / INDEX).read_text())
    frame = zstandard.ZstdCompressor().compress(bytes(3))
    if nbytes > 3:  # a header that claims so much
        frame = frame[:4] + bytes([0xE0]) + nbytes.to_bytes(8, "little") + frame[6:]
    save_file({name: np.frombuffer(frame, np.uint8)}, folder / "evil.safetensors")
    index["weight_map"] = {name: "evil.safetensors"}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointCorruptError, match=f"{nbytes} bytes in place of"):
        next(follow(tmp_path / "w", newest=True)).read()


def test_without_the_library_deltas_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigurationError, match=r"dcp_datastates\[weights\]"):
        Weights(tmp_path, delta="xor")
    with pytest.raises(ConfigurationError, match="delta='zip'"):
        Weights(tmp_path, delta="zip")
