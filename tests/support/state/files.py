"""Independent eyes on the files of a checkpoint: nothing here uses the package."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 1 << 20


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC32C bit by bit from its polynomial, as in RFC 3720: slow, and no code but this file's."""
    value = 0xFFFFFFFF
    table = _TABLE
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


@dataclass(frozen=True)
class DataFile:
    """A safetensors file, taken apart."""

    raw: bytes
    header: dict[str, Any]
    metadata: dict[str, str]
    data_start: int

    def span(self, key: str) -> tuple[int, int]:
        """Where the entry's bytes begin and end in the file."""
        begin, end = self.header[key]["data_offsets"]
        return self.data_start + begin, self.data_start + end

    def content(self, key: str) -> bytes:
        begin, end = self.span(key)
        return self.raw[begin:end]


def read_file(path: Path) -> DataFile:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    return DataFile(raw, header, metadata, 8 + length)


def data_files(path: Path) -> list[Path]:
    """Every data file below a checkpoint's directory."""
    return sorted(Path(path).rglob("*.safetensors"))


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


@contextlib.contextmanager
def put_back(path: Path) -> Iterator[Path]:
    """Whatever the block does below ``path``, afterwards there are the same files, and no others."""
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    yield path
    shutil.rmtree(path)
    for file, data in before.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


# What makes lengths and indices large, and means something in JSON.
INTERESTING = b"\x00\x01\x7f\x80\xff" + b'019-.eE{}[],:"\\nt'


def mutated(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one to three bytes or stretches flipped, put in, cut out, copied or swapped."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(changed) + 1)
        length = min(len(changed) - at, chance.choice((1, 1, 1, 2, 4, 8, 30, 300)))
        how = chance.randrange(7)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif how == 1 and at < len(changed):
            changed[at] = chance.choice(INTERESTING)
        elif how == 2:
            changed[at:at] = chance.randbytes(length or 1)
        elif how == 3:
            changed[at:at] = bytes([chance.choice(INTERESTING)]) * chance.choice((1, 2, 300))
        elif how == 4:
            del changed[at : at + length]
        elif how == 5:
            begin = chance.randrange(len(changed) + 1)
            changed[at:at] = changed[begin : begin + length]
        else:
            begin = chance.randrange(len(changed) + 1)
            changed[at : at + length] = data[begin : begin + length]
    return bytes(changed)
