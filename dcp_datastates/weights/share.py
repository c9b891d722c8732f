"""What one rank writes of a version: files of whole tensors, or of what has changed in them since the version before.

A delta is in the format that slime writes and SGLang's ``/pull_weights`` reads (THUDM/slime 624b824a,
``update_weight_from_disk_delta.py``). For each tensor with a changed byte, the file has one tensor of bytes under its
name: the bytes of the new value XOR those of the old one, compressed as one zstd frame. The header's ``__metadata__``
have the checksum of the new value by the tensor's name. Shapes and dtypes are those of the last full version.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from dcp_datastates._native import crc32c
from dcp_datastates.conversion.hugging_face import safetensors_header
from dcp_datastates.conversion.source import PIECE_BYTES, Source, as_bytes
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError, DataStatesError
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.storage.object_store import put_pieces

DELTA: Final = {
    "delta_encoding": "xor",
    "compression_format": "zstd",
    "checksum_format": "adler32",
}
"""In the metadata of a delta's index."""

_LEVEL: Final = 1
"""Of zstd, as slime's: it keeps up with a disk."""
_PARTS_IN_FLIGHT: Final = 4

Bytes = npt.NDArray[np.uint8]


@dataclass
class Written:
    """What a rank has written."""

    files: dict[str, list[str]] = field(default_factory=dict)
    """The names of the tensors in each file."""
    sums: dict[str, str] = field(default_factory=dict)
    """The CRC-32C of each tensor of the rank, by name."""
    nbytes: int = 0


class Share:
    """One rank's share of the versions. One thread uses it.

    Args:
        is_kept: whether the bytes of the newest version are kept, for a delta: in memory.
        check: called before each piece; raises to end the writing.
    """

    def __init__(self, is_kept: bool, check: Callable[[], None]) -> None:
        self.held = 0
        """The version whose bytes are kept; 0: of none. The caller sets it once the version is published."""
        self._is_kept = is_kept
        self._check = check
        self._bytes: dict[str, Bytes] = {}

    def write(
        self, source: Source, files: Mapping[str, list[str]], place: ObjectPath, base: int
    ) -> Written:
        """Write ``files``, which have the tensors of these names, below ``place``. ``base``: the version of which this
        is a delta; 0: a full version.

        Raises :class:`DataStatesError` if the tensors are not those of ``base``; :class:`StorageError`.
        """
        usable, self.held = self.held == base, 0
        sizes = {name: source.tensors[name].nbytes for names in files.values() for name in names}
        if base and not (usable and sizes == {n: len(each) for n, each in self._bytes.items()}):
            raise DataStatesError(
                f"the tensors have changed since version {base}; the next is full"
            )
        if not base:
            self._bytes = {}
        written = Written()
        for file, names in files.items():
            hit("weights.write.before")
            pieces, nbytes, inside = (self._changed if base else self._whole)(
                source, names, written
            )
            if inside:
                put_pieces(place.store, (place / file).key, nbytes, pieces, _PARTS_IN_FLIGHT)
                written.files[file] = inside
                written.nbytes += nbytes
            hit("weights.write.after")
        return written

    def _whole(
        self, source: Source, names: Sequence[str], written: Written
    ) -> tuple[Iterator[Buffer], int, list[str]]:
        """The content of a file, its length, and the names of its tensors."""
        header, ordered = safetensors_header(source, names)

        def pieces() -> Iterator[Buffer]:
            yield header
            for name, data in self._read(source, ordered, written):
                if self._is_kept:
                    self._bytes[name] = np.array(data, np.uint8)
                for begin in range(0, len(data), PIECE_BYTES):
                    self._check()
                    yield data[begin : begin + PIECE_BYTES]

        nbytes = len(header) + sum(source.tensors[name].nbytes for name in ordered)
        return pieces(), nbytes, ordered

    def _changed(
        self, source: Source, names: Sequence[str], written: Written
    ) -> tuple[Iterator[Buffer], int, list[str]]:
        """The same of what has changed since the bytes that are kept, which become those of ``source``."""
        frames: dict[str, bytes] = {}
        checksums: dict[str, str] = {}
        compress = zstd().ZstdCompressor(level=_LEVEL).compress
        for name, data in self._read(source, names, written):
            self._check()
            new, kept = np.frombuffer(data, np.uint8), self._bytes[name]
            np.bitwise_xor(kept, new, out=kept)
            if kept.any():
                frames[name] = compress(kept)
                checksums[name] = f"{zlib.adler32(data):08x}"
            kept[:] = new
        entries: dict[str, Any] = {"__metadata__": checksums}
        end = 0
        for name, frame in frames.items():
            begin, end = end, end + len(frame)
            entries[name] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return chain([header], frames.values()), len(header) + end, list(frames)

    def _read(
        self, source: Source, names: Sequence[str], written: Written
    ) -> Iterator[tuple[str, memoryview]]:
        """The bytes of these tensors."""
        for group in source.groups(names, PIECE_BYTES):
            for name, tensor in zip(group, source.read(group), strict=True):
                data = as_bytes(tensor)
                written.sums[name] = f"{crc32c(data):08x}"
                yield name, data


def apply(frame: Buffer, to: Bytes) -> None:
    """Change the bytes of a tensor as a delta says.

    Raises :class:`CheckpointCorruptError` for a frame that is damaged, or is one of another size.
    """
    library = zstd()
    try:
        nbytes = library.frame_content_size(frame)  # before so much is allocated
        if nbytes != len(to):
            raise CheckpointCorruptError(f"its delta has {nbytes} bytes in place of {len(to)}")
        changed = library.ZstdDecompressor().decompress(frame)
    except library.ZstdError as error:
        raise CheckpointCorruptError(f"its delta is damaged: {error}") from None
    np.bitwise_xor(to, np.frombuffer(changed, np.uint8), out=to)


def zstd() -> Any:
    """The library. Raises :class:`ConfigurationError` if it is not installed."""
    try:
        import zstandard
    except ImportError:
        raise ConfigurationError(
            "deltas of weights need zstandard: pip install 'dcp_datastates[weights]'"
        ) from None
    return zstandard
