"""One version of a model's weights: a Hugging Face folder, ``<root>/weight_v000123``, which its index publishes.

These objects are in it:

- ``claim``, created once: the job that made it writes this version, and no other job does.
- ``model-00001-of-00008.safetensors``, and so on: whole tensors; small files, such as ``config.json``.
- ``model.safetensors.index.json``, created once and last. It is the decision: either the version is published, and all
  the others are there; or it is *withdrawn*, and never will be. So no reader sees half a version, and a version whose
  job has died can be removed, however late that job's processes are.

Beside the file of each tensor, the index has the checksum of its bytes (CRC-32C, in hexadecimal), the version's number,
and the step of its checkpoint.
"""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from dcp_datastates._native import crc32c
from dcp_datastates.checkpoints.formats import HUGGING_FACE_INDEX
from dcp_datastates.checkpoints.inventory import remove_all
from dcp_datastates.conversion.hugging_face import weight_map
from dcp_datastates.conversion.source import as_bytes
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointSupersededError,
    ConfigurationError,
)
from dcp_datastates.format import values
from dcp_datastates.format.contents import some_of
from dcp_datastates.storage import local_store
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import Location, stored
from dcp_datastates.storage.object_store import ObjectMissingError

_NAME: Final = re.compile(r"weight_v(\d{6,9})")
_HIGHEST: Final = 10**9 - 1
_CLAIM: Final = "claim"
_WITHDRAWN: Final = b'{"withdrawn": true}\n'
"""An index without a ``weight_map``, which no library loads."""


def version_path(root: Location, number: int) -> Location:
    """Where the version of this number lies."""
    return root / f"weight_v{number:06d}"


def numbers_below(root: Location) -> list[int]:
    """The numbers of all versions below ``root``, published or not, in order. Raises :class:`StorageError`."""
    place = stored(root)
    found = filter(None, map(_NAME.fullmatch, place.store.list(place.key).folders))
    return sorted(int(match[1]) for match in found)


def claim(root: Location) -> int:
    """Claim a new version, whose number is above all others'; returns it.

    Raises :class:`ConfigurationError` if there is no such number, and :class:`StorageError`.
    """
    number = max(numbers_below(root), default=0) + 1
    while True:
        if number > _HIGHEST:
            raise ConfigurationError(
                f"{version_path(root, number - 1)} has the highest number that a version can have; remove it"
            )
        place = stored(version_path(root, number))
        if place.is_local:
            local_store.make_folder(place.key, "weights")
        if place.store.put_if_absent((place / _CLAIM).key, str(time.time()).encode()):
            return number
        number += 1  # another job's; or this call's own, whose reply was lost


def publish(
    root: Location, number: int, index: Mapping[str, Any], small: Mapping[str, bytes]
) -> None:
    """Publish a version whose shards are there, with these ``small`` files beside them.

    Raises :class:`CheckpointSupersededError` if another process has withdrawn it; :class:`StorageError`: it may be
    published.
    """
    place = stored(version_path(root, number))
    for name, data in small.items():
        place.store.put((place / name).key, data)
    data = json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
    hit("weights.publish.before")
    key = (place / HUGGING_FACE_INDEX).key
    # A retry finds what the first try has made.
    if not place.store.put_if_absent(key, data) and place.store.get(key) != data:
        raise CheckpointSupersededError(
            f"{place} was withdrawn: another job publishes below {str(root)!r}, or this one was late"
        )
    hit("weights.publish.after")


def is_published(root: Location, number: int) -> bool:
    """Whether a version is published, and not deleted. Raises :class:`StorageError`."""
    place = stored(version_path(root, number) / HUGGING_FACE_INDEX)
    try:
        return bytes(place.store.get_range(place.key, 0, len(_WITHDRAWN))) != _WITHDRAWN
    except ObjectMissingError:
        return False


def index_of(root: Location, number: int) -> dict[str, Any] | None:
    """The index of a version; None if it is not published, or was withdrawn or deleted.

    Raises :class:`CheckpointCorruptError` if it is no index, and :class:`StorageError`.
    """
    if not is_published(root, number):
        return None
    place = stored(version_path(root, number) / HUGGING_FACE_INDEX)
    try:
        data = place.store.get(place.key)
    except ObjectMissingError:
        return None
    if data == _WITHDRAWN:
        return None
    try:
        values.check_memory(len(data), data)
        found = values.load(data)
    except values.ValueRefused as error:
        raise CheckpointCorruptError(f"{place} is no index: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("metadata"), dict):
        raise CheckpointCorruptError(f"{place} has no metadata")
    return {**found, "weight_map": weight_map(place.location, found)}


def found_index(root: Location, number: int) -> dict[str, Any]:
    """:func:`index_of` a version that must be there. Raises :class:`CheckpointNotFoundError` if it is not."""
    if (index := index_of(root, number)) is None:
        path = version_path(root, number)
        raise CheckpointNotFoundError(
            errno.ENOENT, f"{path} is not published, or was removed", str(path)
        )
    return index


def about(index: Mapping[str, Any]) -> tuple[int | None, float]:
    """The step of the checkpoint that a version was made of, and when it was published."""
    metadata = index["metadata"]
    step = metadata.get("step", "")
    try:
        return (int(step) if step.isdigit() else None), float(metadata.get("published_at", 0))
    except (AttributeError, TypeError, ValueError):
        raise CheckpointCorruptError(f"the metadata of an index are {metadata!r}") from None


def checksums_of(index: Mapping[str, Any]) -> Mapping[str, Any]:
    """The checksum of each tensor of a version, by its name."""
    found = index.get("checksums")
    return found if isinstance(found, dict) else {}


def check(
    root: Location, number: int, index: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raise :class:`CheckpointCorruptError` unless ``tensors`` are those of a version, by their checksums."""
    path, sums = version_path(root, number), checksums_of(index)
    if alone := sums.keys() ^ tensors.keys():
        raise CheckpointCorruptError(
            f"{path}: the index and the files differ in {some_of(sorted(alone))}"
        )
    for name, tensor in tensors.items():
        if f"{crc32c(as_bytes(tensor)):08x}" != sums[name]:
            raise CheckpointCorruptError(
                f"{path}: the bytes of {name!r} do not match their checksum in the index"
            )


def is_delta(root: Location, number: int) -> bool:
    """Whether a version has only what has changed since the one before. Raises as :func:`index_of`."""
    return base_of(index_of(root, number) or {}) > 0


def base_of(index: Mapping[str, Any]) -> int:
    """The version of which that with this index is a delta; 0: it is full. Raises :class:`CheckpointCorruptError`."""
    metadata = index["metadata"]
    if "delta_encoding" not in metadata:
        return 0
    try:
        return int(metadata["base_version"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointCorruptError(f"the index of a delta names no base: {metadata!r}") from None


def remove(root: Location, numbers: Iterable[int]) -> None:
    """Remove versions. Of one that was not published, its job can publish it no more. Raises :class:`StorageError`."""
    for number in numbers:
        place = stored(version_path(root, number))
        key = (place / HUGGING_FACE_INDEX).key
        try:
            if not place.store.put_if_absent(key, _WITHDRAWN):
                place.store.put(key, _WITHDRAWN)
        except ObjectMissingError:  # another process has removed its folder
            continue
        remove_all(place.location, [HUGGING_FACE_INDEX])
