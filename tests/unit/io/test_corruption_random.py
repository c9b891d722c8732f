"""Thousands of random damages to one checkpoint: right bytes or an error that names them, each time.

Each try damages one file, loads, and puts the file back. What is affected is computed from the files
themselves (``support.state.files``): whatever has a byte in a damaged checksum block of 1 MiB, and, where a
file's size or checksums are damaged, whatever has a byte in it.
"""

from __future__ import annotations

import collections
import logging
import os
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.jobs.ranks import run_on_ranks
from support.state.checkpoints import assert_same, causes, load, load_everything, save, zeros
from support.state.files import BLOCK, data_files, read_file
from support.state.metadata import decision_of
from support.state.states import DTYPES, filled
from support.tiers import tries
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_datastates.errors import CheckpointCorruptError

SEED = int(os.environ.get("FUZZ_SEED", "20241121"))
KINDS = ("flip", "cut", "append", "zero", "swap")
PAGE = 4096

STATE = {
    **{f"small.{dtype}": filled((5, 7), dtype, 1) for dtype in DTYPES},
    "large": filled((700_000,), torch.float32, 2),
    "bytes": filled((1_300_001,), torch.uint8, 3),
    "blocks": filled((1 << 19,), torch.bfloat16, 4),
    "scalar": filled((), torch.float64, 5),
    "empty": torch.zeros(0, 4),
    "text": "t" * 30_000,
    "number": 7,
}
SHARDED = filled((301, 1000), torch.float32, 6)
ALL = {**STATE, "sharded": SHARDED}


def _save(path):
    mesh = init_device_mesh("cpu", (3,))
    save({**STATE, "sharded": distribute_tensor(SHARDED, mesh, [Shard(0)])}, path)


@pytest.fixture(autouse=True)
def _no_logs():
    """DCP logs each failure with its traceback."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("corruption")
    run_on_ranks(3, _save, path=str(path))
    assert len(data_files(path)) == 3
    assert_same(load_everything(path), ALL)
    return path


class Damage(NamedTuple):
    """What is written where; ``size`` is the file's afterwards."""

    kind: str
    writes: tuple[tuple[int, bytes], ...]
    size: int


def _damage(raw, kind, chance):
    """A damage of that kind which changes something."""
    size = len(raw)
    while True:
        if kind == "cut":
            return Damage(kind, (), chance.randrange(size))
        if kind == "append":
            more = chance.randbytes(chance.choice((1, 4, 100, PAGE)))
            return Damage(kind, ((size, more),), size + len(more))
        if kind == "flip":
            at = chance.randrange(size)
            return Damage(kind, ((at, bytes([raw[at] ^ 1 << chance.randrange(8)])),), size)
        if kind == "zero":
            at = chance.randrange(size) // PAGE * PAGE
            length = min(PAGE, size - at)
            if any(raw[at : at + length]):
                return Damage(kind, ((at, bytes(length)),), size)
        if kind == "swap":
            length = chance.choice([step for step in (64, PAGE, BLOCK) if 2 * step < size])
            count = size // length
            first, second = (chance.randrange(count) * length for _ in range(2))
            one, other = raw[first : first + length], raw[second : second + length]
            if one != other:
                return Damage(kind, ((first, other), (second, one)), size)


class Damaged:
    """A file with the damage, for as long as the block runs."""

    def __init__(self, path, raw, damage):
        self.path, self.raw, self.damage = path, raw, damage

    def __enter__(self):
        with self.path.open("r+b") as file:
            for at, data in self.damage.writes:
                file.seek(at)
                file.write(data)
            file.truncate(self.damage.size)

    def __exit__(self, *_):
        first = min([self.damage.size, *(at for at, _ in self.damage.writes)])
        last = max([len(self.raw), *(at + len(data) for at, data in self.damage.writes)])
        with self.path.open("r+b") as file:
            file.seek(first)
            file.write(self.raw[first:last])
            file.truncate(len(self.raw))


class File(NamedTuple):
    path: Path
    raw: bytes
    spans: dict[str, tuple[int, int]]
    table: int

    def affected(self, damage):
        """The names that must not load."""
        used = {name for name, (begin, end) in self.spans.items() if end > begin}
        if damage.size != len(self.raw):
            return used
        blocks = set()
        for at, data in damage.writes:
            changed = [
                at + place for place, byte in enumerate(data) if self.raw[at + place] != byte
            ]
            if changed[-1] >= self.table:
                return used
            blocks.update(place // BLOCK for place in changed)
        return {
            name
            for name in used
            if not blocks.isdisjoint(
                range(self.spans[name][0] // BLOCK, (self.spans[name][1] - 1) // BLOCK + 1)
            )
        }


@pytest.fixture(scope="module")
def files(checkpoint):
    found = []
    for path in data_files(checkpoint):
        file = read_file(path)
        (table,) = (key for key in file.header if key.startswith("__dcp_datastates__.crc32c"))
        spans = {
            name: file.span(name)
            for name in file.header
            if not name.startswith("__dcp_datastates__")
        }
        found.append(File(path, file.raw, spans, file.span(table)[0]))
    return found


def _tries(files, count, seed):
    chance = random.Random(seed)
    for number in range(count):
        file = chance.choice(files)
        yield file, _damage(file.raw, KINDS[number % len(KINDS)], chance), chance


def _failure(action):
    try:
        action()
    except BaseException as error:  # DCP's CheckpointException is no Exception
        return error
    return None


def _check(error, file, names):
    """The error is the right one: of its type, of the file, and of a tensor (or object) that is affected."""
    for cause in causes(error):
        assert isinstance(cause, CheckpointCorruptError), repr(cause)
        assert file in str(cause), cause
        assert not names or any(repr(name) in str(cause) for name in names), (str(cause), names)


@pytest.mark.parametrize("count", tries(60, 600))
def test_a_load_of_everything(count, checkpoint, files):
    counts = collections.Counter()
    for file, damage, _ in _tries(files, count, SEED):
        affected = file.affected(damage)
        with Damaged(file.path, file.raw, damage):
            found = {}
            failure = _failure(lambda found=found: found.update(load_everything(checkpoint)))
        if failure is None:
            assert not affected, f"{damage.kind} of {sorted(affected)} was not seen"
            assert_same(found, ALL)
        else:
            _check(failure, file.path.name, affected)
        counts[f"{damage.kind}: {'nothing needed was hit' if failure is None else 'refused'}"] += 1
    assert_same(load_everything(checkpoint), ALL)
    _report("loads of everything", SEED, counts)
    assert counts.total() == count


@pytest.mark.parametrize("count", tries(150, 1500))
def test_a_load_of_one_thing(count, checkpoint, files):
    counts = collections.Counter()
    names = list(ALL)
    for number, (file, damage, chance) in enumerate(_tries(files, count, SEED + 1)):
        affected = file.affected(damage)
        name = chance.choice(sorted(affected) if number % 2 and affected else names)
        target = {name: zeros(ALL[name]) if isinstance(ALL[name], torch.Tensor) else None}
        with Damaged(file.path, file.raw, damage):
            failure = _failure(lambda target=target: load(target, checkpoint))
        if failure is None:
            assert name not in affected, f"{damage.kind} of {name} was not seen"
            assert_same(target[name], ALL[name], name)
        else:
            assert name in file.spans, f"{damage.kind} of {file.path} hit {name}: {failure!r}"
            _check(failure, file.path.name, {name})
        counts[f"{damage.kind}: {'loaded' if failure is None else 'refused'}"] += 1
    _report("loads of one thing", SEED + 1, counts)
    assert counts.total() == count
    for kind in KINDS:
        assert counts[f"{kind}: refused"] >= count // 20
        assert counts[f"{kind}: loaded"] >= count // 20


@pytest.mark.parametrize("count", tries(100, 1500))
def test_damaged_metadata(count, checkpoint):
    path = decision_of(checkpoint)
    raw = path.read_bytes()
    counts = collections.Counter()
    for _, damage, _ in _tries([File(path, raw, {}, len(raw))], count, SEED + 2):
        target = {"scalar": torch.zeros((), dtype=torch.float64)}
        with Damaged(path, raw, damage):
            failure = _failure(lambda target=target: load(target, checkpoint))
        assert failure is not None, f"{damage.kind} was not seen"
        _check(failure, "decision", set())
        counts[f"{damage.kind}: refused"] += 1
    _report("damaged metadata", SEED + 2, counts)
    assert counts.total() == count


def _report(what, seed, counts):
    print(f"{what}, seed {seed}: {counts.total()} tries")
    for kind, count in sorted(counts.items()):
        print(f"  {count:5} {kind}")
