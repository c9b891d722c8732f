"""Reads safetensors files: one alone, or those of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from dcp_datastates.checkpoints.inventory import names_at
from dcp_datastates.conversion.files import Array, opened, read_parts, read_whole, stream_of
from dcp_datastates.conversion.source import Source, TensorInfo, Want
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    IncompatibleStateError,
)
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.layout import MAX_HEADER_BYTES, SAFETENSORS_NAME
from dcp_datastates.format.safetensors_header import Header, read_header
from dcp_datastates.storage.object_path import Location

__all__ = ["NAME_OF", "SafetensorsSource", "is_safetensors", "weights_in"]

NAME_OF: Final[Mapping[torch.dtype, str]] = {
    **SAFETENSORS_NAME,
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
"""The names of safetensors 0.8, also of those dtypes that the data files of this package store as bytes."""

_DTYPE_OF: Final = {name: dtype for dtype, name in NAME_OF.items()}

_INDEX: Final = ".safetensors.index.json"
_INDEX_BYTES: Final = 1 << 30


class SafetensorsSource(Source):
    """Tensors in safetensors files."""

    def __init__(
        self, path: Location, files: Iterable[Location], only: Mapping[str, Location] | None
    ) -> None:
        """``only``: the names that count, and the file of each; None: all names."""
        self.path = path
        files = list(files)
        self.format = "safetensors" if files == [path] else "Hugging Face"
        self._arrays: dict[str, Array] = {}
        for file in files:
            self._add(file, only)
        names = self._arrays if only is None else only
        if missing := [name for name in names if name not in self._arrays]:
            raise CheckpointCorruptError(
                f"{path}: the index has {some_of(missing)}, and the file that it names has not"
            )
        self.tensors = {
            name: TensorInfo(self._arrays[name].dtype, self._arrays[name].shape) for name in names
        }

    def fill(self, wants: Sequence[Want]) -> None:
        """See :class:`Source`."""
        read_parts((self._arrays[want.name], part) for want in wants for part in self.parts(want))

    def _add(self, file: Location, only: Mapping[str, Location] | None) -> None:
        header = _header(file)
        _check_is_whole(file, header)
        for entry in header.entries:
            if only is not None and only.get(entry.name) != file:
                continue
            if entry.name in self._arrays:
                raise CheckpointCorruptError(f"{entry.name!r} is in several files of {self.path}")
            dtype = _DTYPE_OF.get(entry.dtype)
            if dtype is None:
                raise IncompatibleStateError(
                    f"{file}: {entry.name!r} has the dtype {entry.dtype}, which torch does not have"
                )
            strides = torch.empty(entry.shape, dtype=dtype, device="meta").stride()
            self._arrays[entry.name] = Array(
                file, header.data_start + entry.data_offsets[0], dtype, entry.shape, strides
            )


def _header(file: Location) -> Header:
    with opened(file) as open_file:
        stream = stream_of(open_file)
        first = stream.read(8)
        data = first + stream.read(min(int.from_bytes(first, "little"), MAX_HEADER_BYTES))
    try:
        return read_header(data, open_file.nbytes)
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{file}: {error}") from None


def is_safetensors(first: bytes) -> bool:
    """Whether a file with these ``first`` 9 bytes begins like one of safetensors."""
    return first[8:] == b"{" and int.from_bytes(first[:8], "little") <= MAX_HEADER_BYTES


def weights_in(folder: Location) -> SafetensorsSource | None:
    """The weights in a Hugging Face folder: by its index, or in its only safetensors file. None: there are none.

    Raises :class:`CheckpointCorruptError`, :class:`CheckpointNotFoundError` or :class:`ConfigurationError`.
    """
    names = sorted(names_at(folder))
    indexes = [folder / name for name in names if name.endswith(_INDEX)]
    files = [folder / name for name in names if name.endswith(".safetensors")]
    preferred = folder / f"model{_INDEX}"
    if (folder / "model.safetensors") in files:  # as transformers does
        files, indexes = [folder / "model.safetensors"], []
    elif preferred in indexes or len(indexes) == 1:
        only = _read_index(preferred if preferred in indexes else indexes[0], names)
        return SafetensorsSource(folder, sorted(set(only.values())), only)
    if len(indexes) + len(files) > 1:
        raise ConfigurationError(
            f"{folder} has several files that may be meant, such as {(indexes or files)[0].name!r}, and no "
            f"'model{_INDEX}'; pass the path of one file"
        )
    return SafetensorsSource(folder, files, None) if files else None


def _read_index(path: Location, beside: Collection[str]) -> dict[str, Location]:
    """The file of each name. ``beside``: the names of the files beside the index."""
    try:
        content: Any = json.loads(read_whole(path, _INDEX_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path} is no JSON: {str(error)[:200]}") from None
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not set(map(type, weights.values())) <= {str}:
        raise CheckpointCorruptError(f"{path} has no weight_map from names to files")
    for file in set(weights.values()):
        if file != Path(file).name or file in ("", ".", ".."):
            raise CheckpointCorruptError(f"{path} names {file!r}, which is no file beside it")
        if file not in beside:
            raise CheckpointNotFoundError(
                f"{path.parent}: {file!r}, which the index names, is missing"
            )
    return {name: path.parent / file for name, file in weights.items()}


def _check_is_whole(file: Location, header: Header) -> None:
    """Raise if the file holds shards of tensors, of which the header alone has the shapes."""
    if "dcp_datastates" in header.metadata:
        raise ConfigurationError(
            f"{file} is a data file of a checkpoint of dcp_datastates; pass the checkpoint's directory"
        )
    try:
        shards = json.loads(header.metadata.get("DCP_SHARDING_INFO", "{}"))
        # The first rank's shards begin at zero, too: only the name of the file tells them from whole tensors.
        of_one_rank = file.name.startswith("shard-")
        cut = [name for name, each in shards.items() if any(each["saved_offsets"]) or of_one_rank]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointCorruptError(f"{file}: its DCP_SHARDING_INFO are malformed") from None
    if cut:
        raise ConfigurationError(
            f"{file} has shards of {some_of(cut)}; consolidate the files first, with "
            f"torch.distributed.checkpoint.HuggingFaceStorageWriter"
        )
