"""The storage reader: loads a committed checkpoint, verified, at any world size, mesh or placement.

DCP's calls, on each rank: ``read_metadata  set_up_storage_reader  prepare_local_plan
[prepare_global_plan]  read_data``.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import add
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future as TorchFuture

from dcp_datastates.config import parse_flag, parse_host_cache_size
from dcp_datastates.errors import (
    CheckpointCorruptError,
    ConfigurationError,
    DataStatesError,
    IncompatibleStateError,
)
from dcp_datastates.format.metadata_objects import metadata_of
from dcp_datastates.format.metadata_table import MetadataTable
from dcp_datastates.io.committed import open_nearest
from dcp_datastates.io.engine import DEFAULT_HOST_CACHE_BYTES, engine
from dcp_datastates.io.reads import Reads
from dcp_datastates.io.unpickling import unpickled
from dcp_datastates.loading.fit import Answer, Fit
from dcp_datastates.loading.fitting import Fitting
from dcp_datastates.loading.stored import Shards, Stored
from dcp_datastates.loading.wrapper_loading import Wrappers
from dcp_datastates.planning.comparison import forget_histories
from dcp_datastates.process.forks import public
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.ranks.rank_set import rank_set_of
from dcp_datastates.sharing.shared_reads import JointReads, assigned
from dcp_datastates.storage.object_path import AnyPath, Location, locate, locate_all
from dcp_datastates.tiers.run_identity import loaded_from


class DataStatesReader(StorageReader):
    """Loads checkpoints that :class:`~dcp_datastates.DataStatesWriter` saved.

    Pass it as ``storage_reader=`` to :func:`torch.distributed.checkpoint.load`, with any planner. It reads only the
    bytes that the target state needs (rounded to checksum blocks of 1 MiB), and verifies every byte before it is used.

    Args:
        path: Directory of the checkpoint, or a URL such as ``"s3://bucket/run/step-100"``. A list of them means tiers
            with copies of it, the nearest first: each data file is read from the nearest copy that is undamaged. None
            if every load passes ``checkpoint_id``.
        allow_objects: Whether Python objects may be unpickled that need more than safe types, and may run code; only
            for checkpoints from sources you trust. Safe are the types that ``torch.load`` reads with
            ``weights_only=True``, those that ``torch.serialization.add_safe_globals`` adds, and plain values of NumPy
            and of Python's library (arrays, dates, paths). A load of any other object is an
            :class:`UnsafeObjectError`. DCP's planner unpickles with ``weights_only=False``, so the bytes that it is
            given were read with safe types before.
        cast: Whether a tensor may be loaded into a tensor of another dtype. Stock DCP casts silently; here the default
            is to refuse.
        unexpected: What to do about a stored tensor or object that no rank's state has: ``"error"``; ``"warn"`` (a line
            in the log has the first names); ``"ignore"``. DCP reads only the names in the target state, and the
            ``state_dict()`` of an optimizer that has not stepped has none.
        exclude: Names, or prefixes of names (``"optimizer"``), that are left unread on purpose; ``*`` and ``?`` stand
            for any text and any character.
        share_reads: Whether ranks that need the same bytes read them from storage once, and pass them on to each other
            over TCP. None: if the path is a URL (but no node's) or in a network file system. See docs/tune.md.
        host_cache_size: Host memory for staging, bytes or a string such as ``"64MiB"``, the default. Used only if this
            process has no engine yet.
        storage_options: For URLs: fsspec's options for the file system, such as credentials. They are never shown. None
            takes all from the environment.

    Raises:
        ConfigurationError: an option has a value that cannot work, or the library for the store is not installed.

    A load raises :class:`CheckpointNotFoundError`, :class:`CheckpointCorruptError`, :class:`IncompatibleStateError`,
    :class:`CheckpointReplacedError`, :class:`UnsafeObjectError` or :class:`StorageError`. With several ranks, DCP wraps
    them in its ``CheckpointException``.

    Threads: one load at a time uses a reader, as with any DCP reader.
    """

    @public("DataStatesReader()")
    def __init__(
        self,
        path: AnyPath | Sequence[AnyPath] | None = None,
        *,
        allow_objects: bool = False,
        cast: bool = False,
        unexpected: Answer = "warn",
        exclude: str | Iterable[str] = (),
        share_reads: bool | None = None,
        host_cache_size: int | str = DEFAULT_HOST_CACHE_BYTES,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        parse_flag("allow_objects", allow_objects)
        if share_reads is not None:
            parse_flag("share_reads", share_reads)
        self._share_reads = share_reads
        self._fit = Fit.of({"cast": cast, "unexpected": unexpected, "exclude": exclude})
        self._storage_options = storage_options
        self._places = None if path is None else locate_all(path, storage_options)
        self._allow_objects = allow_objects
        self._host_cache_bytes = parse_host_cache_size(host_cache_size)
        self._found: MetadataTable | DataStatesError | None = None
        """What :meth:`read_metadata` has found."""
        self._present: _Load | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader can load from ``checkpoint_id``: a path, or a URL with a bucket. Opens nothing."""
        try:
            locate(checkpoint_id)
        except ConfigurationError:
            return False
        return True

    @property
    def checkpoint_id(self) -> str:
        """The path, for DCP's logs."""
        return "" if self._places is None else str(self._places[0])

    @public("DataStatesReader.reset()")
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load, from ``checkpoint_id`` if given."""
        before = self._places
        if checkpoint_id is not None:
            self._places = locate_all(checkpoint_id, self._storage_options)
        if self._places != before or isinstance(self._found, DataStatesError):
            self._found = None
        self._forget()

    @public("DataStatesReader.read_metadata()")
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's metadata, without running any code from it.

        If this raises, DCP calls it again with ``rank=``, for metadata of that rank alone, which do not exist here. So
        the first error is kept, and :meth:`set_up_storage_reader` raises it, where DCP does not replace it.
        """
        if "rank" in kwargs and isinstance(self._found, DataStatesError):
            return Metadata({})
        try:
            self._found = open_nearest(self._located_places()).table
        except DataStatesError as error:
            self._found = error
            raise
        metadata = metadata_of(self._found)
        assert metadata.storage_meta is not None
        metadata.storage_meta.checkpoint_id = self.checkpoint_id
        metadata.storage_meta.load_id = str(uuid.uuid4())
        return metadata

    @public("DataStatesReader.set_up_storage_reader()")
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begin the load of what :meth:`read_metadata` has found. A subclass may keep the metadata for later loads."""
        found = self._found
        if isinstance(found, DataStatesError):
            self._found = None
            raise found
        if found is None:
            raise DataStatesError("read_metadata() was not called before this")
        self._forget()
        places = self._located_places()
        stored = Stored(found, places)
        joint = JointReads(self._share_reads, rank_set_of(None), places[0])
        self._present = _Load(stored, joint)
        loaded_from(places)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note the attempt that this rank is about to read, and, if it shares its reads, which blocks."""
        load = self._opened()
        table = load.stored.table
        _, items = load.of(plan)
        offered = load.joint.offer(lambda: Reads.joined(reads_of(items, load.stored)), table)
        plan.storage_data = (table.note.attempt.name, offered)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Coordinator: check that all ranks have seen the same attempt; report the names that no rank reads; say which
        rank reads what several need.

        Raises :class:`IncompatibleStateError` for such names with ``unexpected="error"``.
        """
        load = self._opened()
        noted = [plan.storage_data or (None, b"") for plan in plans]  # a planner may make new ones
        load.stored.check_attempts(str(attempt) for attempt, _ in noted)
        asked = {item.storage_index.fqn for plan in plans for item in plan.items}
        if len(plans) > 1:
            self._tell_unread(load, load.stored.unread(load.stored.marks(asked)))
        else:
            load.asked = asked
        for plan, share in zip(plans, assigned([each for _, each in noted]), strict=True):
            plan.storage_data = share
        return plans

    @public("DataStatesReader.read_data()")
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Read and verify the data of the plan, and copy them into the target tensors; returns when done."""
        load = self._opened()
        forget_histories()
        try:
            self._read(load, plan, planner)
        finally:
            load.joint.close()
        future: TorchFuture[None] = TorchFuture()
        future.set_result(None)
        return future

    def _read(self, load: _Load, plan: LoadPlan, planner: LoadPlanner) -> None:
        stored = load.stored
        # A planner may have lost what the first rank has said.
        share = plan.storage_data if isinstance(plan.storage_data, bytes) else b""
        load.joint.take(share, stored.table)
        engine(self._host_cache_bytes)  # it is of this size, if there is none yet
        found: dict[str, bytes] = {}
        safe: set[bytes] = set()  # equal bytes are checked once

        def take(part: Reads) -> None:
            for row in part.objects:
                name, data = part.names[row], part.data(row)
                if not self._allow_objects and data not in safe:
                    said = f"{stored.places[0]}: object {name!r}"
                    unpickled(io.BytesIO(data), said, allow_objects=False, device="cpu")
                    safe.add(data)
                found[name] = data

        def read(reads: Reads) -> None:
            stored.read(reads, take, sharing=load.joint.sharing)

        wrapped, items = load.of(plan)
        state: dict[str, Any] = getattr(planner, "state_dict", {})
        names = {item.dest_index.fqn: item.storage_index.fqn for item in wrapped}
        wrappers = Wrappers({name: (old, state[name]) for name, old in names.items()}, stored, read)
        left = wrappers.unread
        if load.asked is not None:
            # This rank loads alone. It may hold an empty shard (with no_dist=True), which is in its state, but not in
            # its plan.
            left += stored.unread(stored.marks(load.asked.union(state)))
        self._tell_unread(load, left)
        with collection_paused():
            of_tensors = [item for item in items if item.type != LoadItemType.BYTE_IO]
            memories = [planner.resolve_tensor(item).detach() for item in of_tensors]
            objects, tensors = reads_of(items, stored, memories, self._fit.cast)
        # The planner unpickles whatever it is given. An object that is refused leaves the state as it is.
        read(objects)
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(found[item.storage_index.fqn]))
        wrappers.load()
        read(tensors)
        for item, memory in zip(of_tensors, memories, strict=True):
            planner.commit_tensor(item, memory)

    def __repr__(self) -> str:
        opened = self._present and self._present.stored.table.note.attempt.name
        return f"DataStatesReader({self.checkpoint_id!r}, opened: {opened})"

    def _tell_unread(self, load: _Load, left: list[str]) -> None:
        Fitting(self._fit, load.stored).tell_unread(left, alone=load.asked is not None)

    def _opened(self) -> _Load:
        if self._present is None:
            raise DataStatesError("set_up_storage_reader() was not called before this")
        return self._present

    def _forget(self) -> None:
        if self._present is not None:
            self._present.joint.close()
            self._present = None

    def _located_places(self) -> tuple[Location, ...]:
        if self._places is None:
            raise ConfigurationError(
                "no path to load from: construct DataStatesReader(path), or pass checkpoint_id"
            )
        return self._places


@dataclass
class _Load:
    """One load."""

    stored: Stored
    joint: JointReads
    asked: set[str] | None = None
    """The names in this rank's plan, when it loads alone."""

    def of(self, plan: LoadPlan) -> tuple[list[ReadItem], list[ReadItem]]:
        """The items of wrapper subclasses, which DCP plans as objects as they have no metadata, and the other items."""
        wrapped: list[ReadItem] = []
        others: list[ReadItem] = []
        for item in plan.items:
            (wrapped if item.storage_index.fqn in self.stored.wrappers else others).append(item)
        return wrapped, others


def reads_of(
    items: Sequence[ReadItem],
    stored: Stored,
    memories: Sequence[torch.Tensor] = (),
    cast: bool = False,
) -> tuple[Reads, Reads]:
    """What ``items`` read: objects; and tensors, into these ``memories``, if they are given.

    Raises :class:`IncompatibleStateError` for an object that is to be loaded as a tensor, and for memory of another
    shape; :class:`CheckpointCorruptError` for what is not stored.
    """
    of: dict[bool, list[ReadItem]] = {True: [], False: []}
    for item in items:
        name, is_object = item.storage_index.fqn, item.type == LoadItemType.BYTE_IO
        if name not in stored or (is_object and stored[name] is not None):
            raise CheckpointCorruptError(
                f"{stored.places[0]}: the metadata do not say where {item.storage_index} is stored"
            )
        if not is_object and stored[name] is None:
            raise IncompatibleStateError(f"{name!r} was saved as a Python object, not as a tensor")
        of[is_object].append(item)
    objects, tensors = ([item.storage_index.fqn for item in of[kind]] for kind in (True, False))
    for item, memory in zip(of[False], memories, strict=False):
        if memory.shape != item.lengths:
            raise IncompatibleStateError(
                f"{item.storage_index.fqn!r}: the state has room for {tuple(memory.shape)} where "
                f"{tuple(item.lengths)} was saved"
            )
    begins = (map(add, item.storage_index.offset or (), item.storage_offsets) for item in of[False])
    shards = Shards(
        np.arange(len(tensors)),
        np.array([len(item.lengths) for item in of[False]], np.int64),
        np.array([*chain.from_iterable(begins)], np.int64),
        np.array([*chain.from_iterable(item.lengths for item in of[False])], np.int64),
        list(memories),
    )
    return stored.objects([*dict.fromkeys(objects)]), stored.into(tensors, shards, cast)
