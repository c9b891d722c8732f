"""Metadata files made to order: whole as far as their checksums tell, and anything inside."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcp_datastates._native import (
    crc32c,
)  # compared with support.files.crc32c in test_native_contract
from dcp_datastates.format.pickling import metadata_pickler

__all__ = ["body_of", "rewritten", "with_trailer"]


def with_trailer(body: bytes) -> bytes:
    """A metadata file around any pickle, as the package's layout has it."""
    head = struct.pack("<8sQI", b"DCPDST\x00\x01", len(body), crc32c(body))
    return body + head + struct.pack("<I", crc32c(head))


def body_of(path: Path) -> bytes:
    """The pickle in a checkpoint's metadata file."""
    return Path(path, ".metadata").read_bytes()[:-24]


def rewritten(path: Path, change: Callable[[Any], Any]) -> None:
    """Have ``change`` alter a checkpoint's Metadata object, and write the file again, checksums and all."""
    metadata = pickle.loads(body_of(path))
    replaced = change(metadata)
    written = io.BytesIO()
    metadata_pickler(written).dump(metadata if replaced is None else replaced)
    body = written.getvalue()
    Path(path, ".metadata").write_bytes(with_trailer(body))
