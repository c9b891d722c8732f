"""``follow``: the versions of a model's weights that a training job publishes, one after another, verified."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from dcp_datastates._native import crc32c
from dcp_datastates.config import check_count, parse_flag
from dcp_datastates.conversion.safetensors_files import safetensors_source
from dcp_datastates.conversion.source import Source, as_bytes
from dcp_datastates.errors import (
    CheckpointCorruptError,
    ConfigurationError,
    IncompatibleStateError,
)
from dcp_datastates.format.contents import some_of
from dcp_datastates.loading.stored import cut, shards_of
from dcp_datastates.process.forks import public
from dcp_datastates.storage.object_path import AnyPath, Location, check_opens, locate
from dcp_datastates.weights import version

_MOST_NAMES: Final = 5


@dataclass(frozen=True)
class WeightsVersion:
    """A published version. Any thread may call the methods.

    Attributes:
        number: Counts the versions below a root.
        path: Its folder, which ``from_pretrained`` of transformers loads.
        step: The step of the checkpoint that it was made of.
        published_at: Seconds since the epoch.
    """

    number: int
    path: Location
    step: int | None
    published_at: float
    _index: Mapping[str, Any] = field(repr=False)

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return sorted(self._index["weight_map"])

    def read(self) -> dict[str, torch.Tensor]:
        """The tensors by their names, each compared with its checksum. They lie in mapped files: change nothing in
        them; ``clone()`` what must outlive the version.

        Raises:
            CheckpointCorruptError: a byte is damaged.
            CheckpointNotFoundError: the version was removed meanwhile.
            StorageError: it cannot be read.
        """
        file_of = {name: self.path / file for name, file in self._index["weight_map"].items()}
        source: Source = safetensors_source(self.path, sorted(set(file_of.values())), file_of)
        sums = self._index["checksums"]
        tensors = {}
        for name, tensor in source.tensors.items():
            if f"{crc32c(as_bytes(tensor)):08x}" != sums.get(name):
                raise CheckpointCorruptError(
                    f"{file_of[name]}: the bytes of {name!r} do not match their checksum in the index"
                )
            tensors[name] = tensor
        return tensors

    def load_into(
        self, target: torch.nn.Module | Mapping[str, torch.Tensor], *, strict: bool = True
    ) -> None:
        """Fill a model, or tensors by name, in place, with the values of this version; of a DTensor, this rank's shard.
        All is verified and compared before anything changes. A tensor of another dtype is converted.

        Args:
            target: The model, or its ``state_dict()``.
            strict: Whether the names must be those of the version. False: only those are filled that are in both.

        Raises:
            IncompatibleStateError: a name is missing, or a shape differs.
            CheckpointCorruptError, CheckpointNotFoundError, StorageError: as :meth:`read`.
        """
        parse_flag("strict", strict)
        state = target.state_dict() if isinstance(target, torch.nn.Module) else dict(target)
        tensors = self.read()
        both = [name for name in state if name in tensors]
        if strict and (alone := state.keys() ^ tensors.keys()):
            raise IncompatibleStateError(
                f"{self.path}: {some_of(sorted(alone))} are in the version or in the target, and not in the other; "
                f"strict=False fills what is in both"
            )
        for name in both:
            if state[name].shape != tensors[name].shape:
                raise IncompatibleStateError(
                    f"{self.path}: {name!r} has the shape {tuple(tensors[name].shape)}, and the target "
                    f"{tuple(state[name].shape)}"
                )
        with torch.no_grad():
            for name in both:
                shards = shards_of([name], [state[name]])
                columns = shards.places(np.arange(len(shards.memories)), state[name].dim())
                places = zip(*columns, strict=True)
                for memory, (begins, sizes) in zip(shards.memories, places, strict=True):
                    memory.copy_(cut(tensors[name], begins.tolist(), sizes.tolist()))


@public("follow()")
def follow(
    root: AnyPath,
    *,
    after: int = 0,
    newest: bool = False,
    poll: float = 1.0,
    timeout: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[WeightsVersion]:
    """Yield each version of the weights below ``root`` once, in order, as soon as it is published.

    A version that has been removed before its turn is left out. One process needs no other for this. ::

        for version in follow("s3://bucket/weights"):
            version.load_into(model)

    Args:
        root: The directory, or URL, that :class:`~dcp_datastates.Weights` names. It need not exist yet.
        after: Only versions with higher numbers: that of the last one that was used before a restart.
        newest: Whether versions that are older than the newest are left out, if there are several.
        poll: Seconds between two looks. A look lists ``root``.
        timeout: End after so many seconds without a new version; None: never.
        storage_options: fsspec's, if ``root`` is a URL.

    Raises:
        ConfigurationError: an argument cannot work.
        CheckpointCorruptError: an index is damaged.
        StorageError: ``root`` cannot be read.
    """
    if after:
        check_count("after", after)
    parse_flag("newest", newest)
    if not poll > 0:
        raise ConfigurationError(f"poll={poll!r} must be a number of seconds above 0")
    place = locate(root, options=storage_options)
    check_opens(place)
    return _follow(place, after, newest, poll, timeout)


def _follow(
    root: Location, after: int, newest: bool, poll: float, timeout: float | None
) -> Iterator[WeightsVersion]:
    since = time.monotonic()
    while True:
        found = [number for number in version.numbers_below(root) if number > after]
        if newest:
            found = [number for number in found if version.is_published(root, number)][-1:]
        for number in found:
            if (index := version.index_of(root, number)) is not None:
                after = number
                yield _version(root, number, index)
                since = time.monotonic()
        if timeout is not None and time.monotonic() - since > timeout:
            return
        time.sleep(poll)


def _version(root: Location, number: int, index: Mapping[str, Any]) -> WeightsVersion:
    about = index.get("metadata", {})
    path = version.version_path(root, number)
    return WeightsVersion(number, path, about.get("step"), about.get("published_at", 0.0), index)
