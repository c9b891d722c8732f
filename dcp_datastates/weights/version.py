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

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from dcp_datastates._native import crc32c
from dcp_datastates.checkpoints.inventory import HUGGING_FACE_INDEX, remove_all
from dcp_datastates.conversion.hugging_face import parsed_index, safetensors_source
from dcp_datastates.conversion.source import as_bytes
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointSupersededError,
    ConfigurationError,
)
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


@dataclass(frozen=True)
class Index:
    """What the index of a published version says."""

    number: int
    path: Location
    """The version's folder."""
    base: int
    """The version of which this one is a delta; 0: it is full."""
    step: int | None
    """Of the checkpoint that it was made of."""
    published_at: float
    file_of: Mapping[str, str]
    """The file of each tensor in the folder."""
    checksums: Mapping[str, str]
    """Of each tensor's bytes; of a delta, also of those that have not changed."""

    def stored(self) -> dict[str, torch.Tensor]:
        """What lies in the files, mapped: tensors, or their deltas."""
        file_of = {name: self.path / file for name, file in self.file_of.items()}
        return dict(safetensors_source(self.path, sorted(set(file_of.values())), file_of).tensors)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`CheckpointCorruptError` unless ``tensors`` are this version's, by their checksums."""
        if alone := self.checksums.keys() ^ tensors.keys():
            raise CheckpointCorruptError(
                f"{self.path}: the index and the files differ in {some_of(sorted(alone))}"
            )
        for name, tensor in tensors.items():
            if checksum(as_bytes(tensor)) != self.checksums[name]:
                raise CheckpointCorruptError(
                    f"{self.path}: the bytes of {name!r} do not match their checksum in the index"
                )


def checksum(data: memoryview) -> str:
    """That of a tensor's bytes, as it stands in an index."""
    return f"{crc32c(data):08x}"


def version_path(root: Location, number: int) -> Location:
    """Where the version of this number lies."""
    return root / f"weight_v{number:06d}"


def numbers_below(root: Location) -> list[int]:
    """The numbers of all versions below ``root``, published or not, in order. Raises :class:`StorageError`."""
    place = stored(root)
    found = filter(None, map(_NAME.fullmatch, place.store.list(place.key).folders))
    return sorted(int(match[1]) for match in found)


def is_published(root: Location, number: int) -> bool:
    """Whether a version is published, and not deleted. Raises :class:`StorageError`."""
    place = stored(version_path(root, number) / HUGGING_FACE_INDEX)
    try:
        return bytes(place.store.get_range(place.key, 0, len(_WITHDRAWN))) != _WITHDRAWN
    except ObjectMissingError:
        return False


def index_of(root: Location, number: int) -> Index | None:
    """The index of a version; None if it is not published, or was withdrawn or deleted.

    Raises :class:`CheckpointCorruptError` if it is no index, and :class:`StorageError`.
    """
    path = version_path(root, number)
    place = stored(path / HUGGING_FACE_INDEX)
    try:
        data = place.store.get(place.key)
    except ObjectMissingError:
        return None
    if data == _WITHDRAWN:
        return None
    found, file_of = parsed_index(place.location, data)
    try:
        about = found["metadata"]
        base = int(about["base_version"]) if "delta_encoding" in about else 0
        if not (0 < base < number or "delta_encoding" not in about):
            raise ValueError(f"version {number} says that it is a delta of {base}")
        step = about.get("step", "")
        step = int(step) if step.isdigit() else None
        published_at, checksums = float(about.get("published_at", 0)), found.get("checksums", {})
        return Index(number, path, base, step, published_at, file_of, dict(checksums))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{place} is no index: {error!r}") from None


def is_delta(root: Location, number: int) -> bool:
    """Whether a published version has only what has changed since another. Raises as :func:`index_of`."""
    index = index_of(root, number)
    return index is not None and index.base > 0


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
