"""What one rank writes of a version: files of whole tensors, or of what has changed in them since the version before.

A delta is in the format that slime writes and SGLang's ``/pull_weights`` reads (THUDM/slime 624b824a,
``update_weight_from_disk_delta.py``). For each tensor with a changed byte, the file has one tensor of bytes under its
name: the bytes of the new value XOR those of the old one, compressed as one zstd frame. The header's ``__metadata__``
have the checksum of the new value by the tensor's name. Shapes and dtypes are those of the last full version.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Buffer

from dcp_datastates.conversion.destination import contents
from dcp_datastates.conversion.hugging_face import safetensors_header
from dcp_datastates.conversion.source import Source, as_bytes
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError, DataStatesError
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.storage.object_store import put_pieces
from dcp_datastates.weights.version import checksum

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
    """The checksum of each tensor of the rank, by name."""
    nbytes: int = 0


class _Noted(Source):
    """``source``, of whose tensors ``note`` is given the name and the bytes when they are read."""

    def __init__(self, source: Source, note: Callable[[str, memoryview], object]) -> None:
        super().__init__(source.path, source.format, source.tensors, {}, {})
        self._source, self._note = source, note

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See :class:`Source`."""
        found = self._source.read(names)
        for name, tensor in zip(names, found, strict=True):
            self._note(name, as_bytes(tensor))
        return found


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

        def note(name: str, data: memoryview) -> None:
            written.sums[name] = checksum(data)
            if self._is_kept and not base:
                self._bytes[name] = np.array(data, np.uint8)

        whole = _Noted(source, note)
        for file, names in files.items():
            hit("weights.write.before")
            part, *metadata = self._changes(whole, names) if base else (whole,)
            if inside := [name for name in names if name in part.tensors]:
                header, ordered = safetensors_header(part, inside, *metadata)
                nbytes = len(header) + sum(part.tensors[name].nbytes for name in inside)
                data = contents(part, ordered, lambda _: self._check())
                pieces: chain[Buffer] = chain([header], data)
                put_pieces(place.store, (place / file).key, nbytes, pieces, _PARTS_IN_FLIGHT)
                written.files[file] = inside
                written.nbytes += nbytes
            hit("weights.write.after")
        return written

    def _changes(self, source: Source, names: Sequence[str]) -> tuple[Source, dict[str, str]]:
        """The deltas of those that have changed since the bytes that are kept, which become those of ``source``; and
        the metadata of their file.
        """
        frames: dict[str, torch.Tensor] = {}
        checksums: dict[str, str] = {}
        compress = zstd().ZstdCompressor(level=_LEVEL).compress
        for name, tensor in source.each(names):
            self._check()
            data, kept = as_bytes(tensor), self._bytes[name]
            new = np.frombuffer(data, np.uint8)
            np.bitwise_xor(kept, new, out=kept)
            if kept.any():
                frames[name] = torch.frombuffer(bytearray(compress(kept)), dtype=torch.uint8)
                checksums[name] = f"{zlib.adler32(data):08x}"
            kept[:] = new
            del tensor, data, new
        return Source(source.path, "deltas", frames, {}, {}), checksums


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
