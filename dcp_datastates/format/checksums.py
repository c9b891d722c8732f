"""The checksum table at the end of a data file: one CRC32C per MiB (a block) of the bytes before it, then one of these
words. U32.
"""

from __future__ import annotations

from collections.abc import Iterator

from dcp_datastates._native import BLOCK_BYTES, crc32c


def table_words(table_offset: int) -> int:
    """The number of words in the table of a file whose checksums begin at ``table_offset``."""
    return -(-table_offset // BLOCK_BYTES) + 1


def file_bytes(table_offset: int) -> int:
    """The size of a data file whose checksums begin at ``table_offset``."""
    return table_offset + 4 * table_words(table_offset)


def blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The blocks of ``[begin, end)``; ``begin`` is the start of a block, and the last block may be short."""
    for start in range(begin, end, BLOCK_BYTES):
        yield start, min(start + BLOCK_BYTES, end)


class ChecksumTable:
    """A checksum table, as stored."""

    def __init__(self, words: bytes) -> None:
        """``words``: at least one word; the last is the checksum of the others."""
        self._words = words[:-4]
        self.is_sound = crc32c(self._words) == int.from_bytes(words[-4:], "little")
        """Whether the table matches its own checksum."""

    def matches(self, begin: int, data: memoryview) -> bool:
        """Whether the block ``data`` that begins at ``begin`` matches its checksum."""
        at = 4 * (begin // BLOCK_BYTES)
        return crc32c(data) == int.from_bytes(self._words[at : at + 4], "little")
