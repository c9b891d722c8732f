"""Safetensors files: one alone, or those of a Hugging Face folder.

They are mapped, and written as a stream: memory does not depend on them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from dcp_datastates.checkpoints.formats import HUGGING_FACE_INDEX
from dcp_datastates.checkpoints.inventory import names_at
from dcp_datastates.conversion.destination import write_file
from dcp_datastates.conversion.source import Source, as_bytes, mapped, read_whole
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    IncompatibleStateError,
)
from dcp_datastates.format import values
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.layout import MAX_HEADER_BYTES, SAFETENSORS_NAME
from dcp_datastates.format.safetensors_header import Header, read_header
from dcp_datastates.process.work import Unit
from dcp_datastates.storage.object_path import Location

_NAME_OF: Final[Mapping[torch.dtype, str]] = {
    **SAFETENSORS_NAME,
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
"""The names of safetensors 0.8, also of those dtypes that the data files of this package store as bytes."""

_DTYPE_OF: Final = {name: dtype for dtype, name in _NAME_OF.items()}

_INDEX: Final = ".safetensors.index.json"
_INDEX_BYTES: Final = 1 << 30
_ALIGNMENT: Final = 64
"""Tensors begin at a multiple of this, the larger elements first: each is aligned to its element."""


def safetensors_source(
    path: Location, files: Sequence[Location], only: Mapping[str, Location] | None
) -> Source:
    """The tensors in safetensors ``files``.

    ``only``: the names that count, and the file of each; None: all names. Raises :class:`IncompatibleStateError` for a
    dtype that torch does not have, :class:`CheckpointCorruptError` and :class:`StorageError`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        data = mapped(file)
        header = _header(file, data)
        for entry in header.entries:
            if only is not None and only.get(entry.name) != file:
                continue
            if (dtype := _DTYPE_OF.get(entry.dtype)) is None:
                raise IncompatibleStateError(
                    f"{file}: {entry.name!r} has the dtype {entry.dtype}, which torch does not have"
                )
            begin, end = (header.data_start + each for each in entry.data_offsets)
            flat = torch.empty(0, dtype=dtype, device="cpu").set_(data[begin:end])
            tensors[entry.name] = flat.view(entry.shape)
    names = tensors if only is None else only
    if missing := [name for name in names if name not in tensors]:
        raise CheckpointCorruptError(
            f"{path}: the index has {some_of(missing)}, and the file that it names has not"
        )
    kind = "safetensors" if files == [path] else "Hugging Face"
    return Source(
        path, kind, {name: tensors[name] for name in names}, {}, {name: (name,) for name in names}
    )


def is_safetensors(first: bytes) -> bool:
    """Whether a file with these ``first`` 9 bytes begins like one of safetensors."""
    return first[8:] == b"{" and int.from_bytes(first[:8], "little") <= MAX_HEADER_BYTES


def weights_in(folder: Location) -> Source | None:
    """The weights in a Hugging Face folder: by its index, or in its only safetensors file. None: there are none.

    Raises :class:`CheckpointCorruptError`, :class:`CheckpointNotFoundError` or :class:`ConfigurationError`.
    """
    names = sorted(names_at(folder))
    indexes = [folder / name for name in names if name.endswith(_INDEX)]
    files = [folder / name for name in names if name.endswith(".safetensors")]
    preferred = folder / HUGGING_FACE_INDEX
    if (folder / "model.safetensors") in files:  # as transformers does
        files, indexes = [folder / "model.safetensors"], []
    elif preferred in indexes or len(indexes) == 1:
        only = _read_index(preferred if preferred in indexes else indexes[0], names)
        return safetensors_source(folder, sorted(set(only.values())), only)
    if len(indexes) + len(files) > 1:
        raise ConfigurationError(
            f"{folder} has several files that may be meant, such as {(indexes or files)[0].name!r}, and no "
            f"{HUGGING_FACE_INDEX!r}; pass the path of one file"
        )
    return safetensors_source(folder, files, None) if files else None


def _read_index(path: Location, beside: Collection[str]) -> dict[str, Location]:
    """The file of each name. ``beside``: the names of the files beside the index."""
    try:
        data = read_whole(path, _INDEX_BYTES)
        values.check_memory(len(data), data)
        content = values.load(data)
    except values.ValueRefused as error:
        raise CheckpointCorruptError(f"{path} is no index: {error}") from None
    weights = weight_map(path, content)
    if missing := set(weights.values()).difference(beside):
        raise CheckpointNotFoundError(
            f"{path.parent}: {min(missing)!r}, which the index names, is missing"
        )
    return {name: path.parent / file for name, file in weights.items()}


def weight_map(path: Location, content: Any) -> dict[str, str]:
    """The names of the files by those of the tensors, of the index at ``path`` with this ``content``.

    Raises :class:`CheckpointCorruptError` if that is none, or has another place than beside the index.
    """
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not set(map(type, weights.values())) <= {str}:
        raise CheckpointCorruptError(f"{path} has no weight_map from names to files")
    for file in set(weights.values()):
        if file != Path(file).name or file in ("", ".", ".."):
            raise CheckpointCorruptError(f"{path} names {file!r}, which is no file beside it")
    return weights


def _header(file: Location, data: torch.UntypedStorage) -> Header:
    """The header of a file; raises if the file holds shards of tensors, of which the header alone has the shapes."""
    first = as_bytes(torch.empty(0, dtype=torch.uint8, device="cpu").set_(data))
    length = min(int.from_bytes(first[:8], "little"), MAX_HEADER_BYTES)
    try:
        header = read_header(bytes(first[: 8 + length]), data.nbytes())
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{file}: {error}") from None
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
    return header


def safetensors_unit(source: Source, names: Iterable[str], path: Path) -> Unit:
    """What writes one file with the tensors of these names.

    Raises :class:`ConfigurationError` for a tensor that the format cannot hold.
    """
    header, ordered = safetensors_header(source, names)
    return partial(write_file, source, path, header, ordered)


def safetensors_header(source: Source, names: Iterable[str]) -> tuple[bytes, list[str]]:
    """The beginning of a file with the tensors of these names, and their order in the file. Raises as
    :func:`safetensors_unit`.
    """
    ordered = sorted(names, key=lambda name: -source.tensors[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        shaped = source.tensors[name]
        _check_name(name)
        if shaped.dtype not in _NAME_OF:
            raise ConfigurationError(
                f"{name!r} is {shaped.dtype}, which safetensors does not have; exclude it, or choose another dtype"
            )
        begin, end = end, end + shaped.nbytes
        header[name] = {
            "dtype": _NAME_OF[shaped.dtype],
            "shape": list(shaped.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigurationError(
            f"{len(ordered)} tensors need a header of {len(text)} bytes; safetensors allows {MAX_HEADER_BYTES}: choose "
            f"a smaller shard_size"
        )
    first = len(text).to_bytes(8, "little") + text
    return first, ordered


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"the name {name!r} is no Unicode; rename it") from None
    if name == "__metadata__":
        raise ConfigurationError(f"safetensors reserves the name {name!r}; rename it")
