"""Opens a source of any format, recognized by its content, and says which of its values are taken, and how."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, Final

import torch

from dcp_datastates.checkpoints.formats import Format, format_of
from dcp_datastates.checkpoints.inventory import is_directory, names_at
from dcp_datastates.checkpoints.listing import committed_among, directories
from dcp_datastates.conversion.datastates import DataStatesSource
from dcp_datastates.conversion.safetensors_files import (
    is_safetensors,
    safetensors_source,
    weights_in,
)
from dcp_datastates.conversion.source import Selected, Source, read_whole
from dcp_datastates.conversion.stock import StockSource
from dcp_datastates.conversion.torch_file import check_plain, is_torch_file, torch_source
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    ForeignCheckpointError,
)
from dcp_datastates.format.stored_names import (
    NamePatterns,
    Rename,
    check_rename,
    renamed,
)
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.storage.object_path import Location, ObjectPath, locate

_OPTIMIZER: Final = re.compile(r"(.+?)\.(?:param_groups(?=$|[.\[])|groups\..+\.[0-9a-f]{8}$)")
"""A name within the state of an optimizer, and the optimizer's."""

_SHORT: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def select(
    source: Source,
    only: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    part: str | None = None,
    rename: Rename | None = None,
    dtype: str | torch.dtype | None = None,
) -> Source:
    """The values that these options of :func:`~dcp_datastates.conversion.convert.convert` take from ``source``.

    Raises :class:`ConfigurationError`, naming the first option that cannot work, for names that collide, or if nothing
    is left; :class:`IncompatibleStateError`, listing similar names, for a key or an excluded name that fits nothing;
    :class:`UnsupportedTensorError` for a tensor that is taken and cannot be read.
    """
    if part is not None and (not isinstance(part, str) or not part):
        raise ConfigurationError(f"part={part!r} must be a name, such as 'model'")
    if part is not None and only is not None:
        raise ConfigurationError(
            f"part={part!r} and only={only!r} both choose; part takes all below one name, and removes that name"
        )
    check_rename(rename)
    target_dtype = _dtype(dtype)
    root = None if part is None else NamePatterns("part", part)
    wanted = root if only is None else NamePatterns("only", only)
    unwanted = NamePatterns("exclude", exclude)
    taken = names = list(source.paths)
    if wanted is not None:
        taken = wanted.choose(names)
    left_out = set(unwanted.choose(taken))
    taken = [name for name in taken if name not in left_out]
    if names and not taken:
        raise ConfigurationError(
            f"nothing is left of {source.path}: exclude={sorted(unwanted.given)} takes all out"
        )
    for name in taken:
        tensor = source.tensors.get(name)
        if tensor is not None and not tensor.is_meta:
            check_plain(source.path, name, tensor)
    old_of = renamed(taken, rename, part=root, all_used=True)
    return Selected(source, old_of, target_dtype)


def optimizers_in(source: Source) -> list[str]:
    """The names of the optimizers whose states are in ``source``."""
    found = filter(None, map(_OPTIMIZER.match, source.names()))
    return list(dict.fromkeys(each[1] for each in found))


def _dtype(dtype: Any) -> torch.dtype | None:
    if dtype is None:
        return None
    found = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(
            f"dtype={dtype!r} is no floating-point dtype; give one such as 'bfloat16' or 'bf16'"
        )
    return found


@collection_paused()
def open_source(path: str | os.PathLike[str] | ObjectPath, allow_objects: bool = False) -> Source:
    """Open what is at ``path``: a checkpoint of this package or of stock DCP, a Hugging Face folder, a safetensors
    file or a file of ``torch.save``.

    Reads names, shapes and dtypes, not the tensors' bytes. Runs no code from the checkpoint, unless ``allow_objects``.

    Raises:
        CheckpointNotFoundError: there is none of these; the message says what is there.
        CheckpointCorruptError, StorageError: it cannot be read.
        UnsafeObjectError: it cannot be read without running code from it.
        IncompatibleStateError, UnsupportedTensorError: it has values that cannot be converted.
        ConfigurationError: it is not clear what is meant.
    """
    found = locate(path)
    if is_directory(found):
        return _open_directory(found, allow_objects)
    first = read_whole(found, 9)
    if is_torch_file(first):
        return torch_source(found, allow_objects)
    if is_safetensors(first):
        return safetensors_source(found, [found], None)
    raise ForeignCheckpointError(
        f"{str(found)!r} is neither a safetensors file nor a file of torch.save"
    )


def _open_directory(path: Location, allow_objects: bool) -> Source:
    found = format_of(path)
    if found is Format.DATASTATES:
        return DataStatesSource(path)
    if found in (Format.STOCK, Format.UNKNOWN):
        return StockSource(path, allow_objects)
    weights = weights_in(path)
    if weights is not None:
        return weights
    below = committed_among(directories(path))
    others = sorted(names_at(path))
    there = (
        f"there are checkpoints below it, such as {below[-1].name!r}; pass the path of one"
        if below
        else f"the directory holds {len(others)} other entries, such as {others[0]!r}"
        if others
        else "the directory is empty"
    )
    raise CheckpointNotFoundError(f"no checkpoint of a known format at {str(path)!r}: {there}")
