"""Bytes gone wrong: mutations of real ones, and pickles from a grammar of opcodes."""

from __future__ import annotations

import random
import struct

__all__ = ["mutated", "random_pickle"]


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


# Opcodes, and bytes that make lengths and indices large.
INTERESTING = (
    b"().012BCDFGIJKLMNPQRSTUVX]abcdeghijlopqrstu}\x00\x01\x7f" + bytes(range(0x80, 0x99)) + b"\xff"
)

META = "torch.distributed.checkpoint.metadata"
NAMES = (
    *(
        (META, name)
        for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "StorageMeta")
    ),
    *(
        (META, name)
        for name in ("ChunkStorageMetadata", "TensorProperties", "BytesStorageMetadata")
    ),
    (META, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("builtins", "getattr"),
    ("os", "system"),
)
WORDS = (
    *("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    *("fqn", "offset", "index", "relative_path", "length", "properties", "size", "chunks", "sizes"),
    *(
        "offsets",
        "dcp_datastates",
        "files",
        "attempt",
        "__class__",
        "__setstate__",
        "__dict__",
        "append",
    ),
    *("torch.strided", "w", "..", ""),
)


def _text(words: str) -> bytes:
    return b"\x8c" + bytes([len(words)]) + words.encode()


def random_pickle(chance: random.Random) -> bytes:
    """A pickle whose opcodes mostly find what they need on the stack."""
    atoms = (
        lambda: b"N",
        lambda: chance.choice((b"\x88", b"\x89")),
        lambda: b"K" + chance.randbytes(1),
        lambda: b"J" + chance.randbytes(4),
        lambda: b"\x8a\x08" + chance.randbytes(8),
        lambda: b"G" + chance.randbytes(8),
        lambda: _text(chance.choice(WORDS)),
        lambda: b"\x8e" + struct.pack("<Q", 3) + b"abc",
        lambda: b"".join(map(_text, chance.choice(NAMES))) + b"\x93",
        lambda: b"".join(map(_text, chance.choice(NAMES))) + b"\x93)\x81",
        lambda: b"".join(map(_text, chance.choice(NAMES))) + b"\x93)R",
        lambda: b"h" + bytes([chance.randrange(8)]),
        lambda: chance.choice((b")", b"]", b"}", b"\x8f")),
        lambda: chance.choice((b"\x82\x01", b"Q", b"0", b"2", b"\x97", b"r\xff\xff\xff\x7f")),
    )
    weights = (2, 2, 8, 2, 2, 1, 10, 1, 10, 8, 3, 4, 10, 0.3)

    def value(depth: int) -> bytes:
        kind = chance.randrange(12 if depth else 4)
        if kind < 4:
            return chance.choices(atoms, weights)[0]() + (b"\x94" if chance.random() < 0.2 else b"")
        inner = [value(depth - 1) for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4)))]
        joined = b"".join(inner)
        if kind == 4:
            return b"(" + joined + b"t"
        if kind == 5:
            return b"](" + joined + b"e"
        if kind in (6, 7):
            return b"}(" + b"".join(_text(chance.choice(WORDS)) + part for part in inner) + b"u"
        called = b"".join(map(_text, chance.choice(NAMES))) + b"\x93"
        if kind == 8:
            return called + b"(" + joined + b"tR"
        if kind == 9:
            return called + value(depth - 1) + b"b"
        state = b"}(" + b"".join(_text(chance.choice(WORDS)) + part for part in inner) + b"u"
        return called + b")\x81" + (state if kind == 10 else b"(" + joined + b"t") + b"b"

    body = (
        b"\x80" + bytes([chance.choice((4, 4, 4, 5, 2))]) + value(chance.choice((2, 4, 6))) + b"."
    )
    return mutated(body, chance) if chance.random() < 0.2 else body
