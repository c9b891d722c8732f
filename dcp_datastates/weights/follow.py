"""``follow``: the versions of a model's weights that a training job publishes, one after another, verified."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dcp_datastates.config import check_count, parse_duration, parse_flag
from dcp_datastates.conversion.source import as_bytes
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    IncompatibleStateError,
)
from dcp_datastates.format.contents import some_of
from dcp_datastates.loading.stored import cut, shards_of
from dcp_datastates.process.forks import public
from dcp_datastates.storage.object_path import AnyPath, Location, check_opens, locate
from dcp_datastates.training.models import Wrappers, load_model_state, model_state
from dcp_datastates.weights import version
from dcp_datastates.weights.share import apply
from dcp_datastates.weights.version import Index


@dataclass(frozen=True)
class WeightsVersion:
    """A published version. Any thread may call the methods.

    Attributes:
        number: Counts the versions below a root.
        path: Its folder, which ``from_pretrained`` of transformers loads.
        step: The step of the checkpoint that it was made of; None if that has none.
        published_at: Seconds since the epoch.
    """

    number: int
    path: Location
    step: int | None
    published_at: float
    _index: Index = field(repr=False)
    _reader: _Reader = field(repr=False)

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return sorted(self._index.checksums)

    def read(self) -> dict[str, torch.Tensor]:
        """The tensors by their names, each compared with its checksum. Change nothing in them, and ``clone()`` what
        must outlive the version: they lie in mapped files, or are changed when a later version is read that is a delta.

        Raises:
            CheckpointCorruptError: a byte is damaged.
            CheckpointNotFoundError: the version, or one that it is a delta of, was removed meanwhile.
            ConfigurationError: it is a delta, and zstandard is not installed.
            StorageError: it cannot be read.
        """
        return self._reader.read(self._index)

    def load_into(
        self, target: torch.nn.Module | Mapping[str, torch.Tensor], *, strict: bool = True
    ) -> None:
        """Fill a model, or tensors by name, in place, with the values of this version; of a DTensor, this rank's shard.
        All is verified and compared before anything changes. A tensor of another dtype is converted.

        Args:
            target: The model, compiled and wrapped or not (with FSDP1, all ranks call this), or tensors by name.
            strict: Whether the names must be those of the version. False: only those are filled that are in both.

        Raises:
            IncompatibleStateError: a name is missing, or a shape differs.
            ConfigurationError: a tensor is on the meta device.
            CheckpointCorruptError, CheckpointNotFoundError, StorageError: as :meth:`read`.
        """
        parse_flag("strict", strict)
        model = target if isinstance(target, torch.nn.Module) else None
        given: Any = target if model is None else model_state([model])
        state = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
        tensors = self.read()
        both = [name for name in state if name in tensors]
        if strict and (alone := state.keys() ^ tensors.keys()):
            raise IncompatibleStateError(
                f"{self.path}: {some_of(sorted(alone))} are in the version or in the target, and not in the other; "
                f"strict=False fills what is in both"
            )
        shards = {name: shards_of([name], [state[name]]) for name in both}
        for name in both:
            if any(memory.is_meta for memory in shards[name].memories):
                raise ConfigurationError(
                    f"{name!r} is on the meta device; give the model memory first, by model.to_empty(device=…)"
                )
            if state[name].shape != tensors[name].shape:
                raise IncompatibleStateError(
                    f"{self.path}: {name!r} has the shape {tuple(tensors[name].shape)}, and the target "
                    f"{tuple(state[name].shape)}"
                )
        with torch.no_grad():
            for name, held in shards.items():
                columns = held.places(np.arange(len(held.memories)), state[name].dim())
                places = zip(*columns, strict=True)
                for memory, (begins, sizes) in zip(held.memories, places, strict=True):
                    memory.copy_(cut(tensors[name], begins.tolist(), sizes.tolist()))
        if model is not None and Wrappers.of(model).has_fsdp1:  # its state: copies
            load_model_state([model], given, strict=False)


class _Reader:
    """Reads versions below ``root``, in the order of their numbers. One thread at a time uses it."""

    def __init__(self, root: Location) -> None:
        self._root = root
        self._number = 0
        """The version that :attr:`_tensors` have; 0: none, or a part of one."""
        self._tensors: dict[str, torch.Tensor] = {}
        """Once a version was a delta: its tensors, in memory."""

    def read(self, index: Index) -> dict[str, torch.Tensor]:
        """See :meth:`WeightsVersion.read`."""
        number, deltas = index.number, list[Index]()
        while index.base and index.number != self._number:
            deltas.append(index)
            index = self._index(index.base)
        if index.number != self._number:
            whole = index.stored()
            index.check(whole)
            if not deltas:
                return whole
            self._tensors = {name: each.clone() for name, each in whole.items()}
        self._number = 0
        for delta in reversed(deltas):
            self._apply(delta)
        self._number = number
        return dict(self._tensors)

    def _index(self, number: int) -> Index:
        if (found := version.index_of(self._root, number)) is None:
            path = version.version_path(self._root, number)
            text = f"{path} is not published, or was removed"
            raise CheckpointNotFoundError(errno.ENOENT, text, str(path))
        return found

    def _apply(self, delta: Index) -> None:
        for name, frame in delta.stored().items():
            if name not in self._tensors:
                raise CheckpointCorruptError(
                    f"{delta.path} has a delta of {name!r}, which its base lacks"
                )
            try:
                apply(as_bytes(frame), np.asarray(as_bytes(self._tensors[name])))
            except CheckpointCorruptError as error:
                raise CheckpointCorruptError(f"{delta.path}: {name!r}: {error}") from None
        delta.check(self._tensors)


@public("follow()")
def follow(
    root: AnyPath,
    *,
    after: int = 0,
    newest: bool = False,
    poll: float | str = 1.0,
    timeout: float | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[WeightsVersion]:
    """Yield each version of the weights below ``root`` once, in order, as soon as it is published.

    A version that has been removed before its turn is left out. One process needs no other for this. To read deltas
    (``Weights(delta=…)``), it keeps the tensors in memory. ::

        for version in follow("s3://bucket/weights"):
            version.load_into(model)

    Args:
        root: The directory, or URL, that :class:`~dcp_datastates.Weights` names. It need not exist yet.
        after: Only versions with higher numbers: that of the last one that was used before a restart.
        newest: Whether versions that are older than the newest are left out, if there are several.
        poll: Seconds between two looks, or such as "10s". A look lists ``root``.
        timeout: End after so long without a new version; None: never.
        storage_options: fsspec's, if ``root`` is a URL.

    Raises:
        ConfigurationError: an argument cannot work.
        CheckpointCorruptError: an index is damaged.
        StorageError: ``root`` cannot be read.
    """
    if after:
        check_count("after", after)
    parse_flag("newest", newest)
    seconds = parse_duration(poll, name="poll")
    ends = None
    if timeout is not None:
        ends = 0.0 if timeout == 0 else parse_duration(timeout, name="timeout")
    place = locate(root, options=storage_options)
    check_opens(place)
    return _follow(place, after, newest, seconds, ends)


def _follow(
    root: Location, after: int, newest: bool, poll: float, timeout: float | None
) -> Iterator[WeightsVersion]:
    reader = _Reader(root)
    since = time.monotonic()
    while True:
        found = [number for number in version.numbers_below(root) if number > after]
        if newest:
            found = [number for number in found if version.is_published(root, number)][-1:]
        for number in found:
            if (index := version.index_of(root, number)) is not None:
                after = number
                yield WeightsVersion(
                    number, index.path, index.step, index.published_at, index, reader
                )
                since = time.monotonic()
        if timeout is not None and time.monotonic() - since > timeout:
            return
        time.sleep(poll)
