"""The storage reader: loads a committed checkpoint, verified, at any world size, mesh or placement.

DCP's calls, on each rank: ``read_metadata  set_up_storage_reader  prepare_local_plan
[prepare_global_plan]  read_data``.
"""

from __future__ import annotations

import io
import logging
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future as TorchFuture

from dcp_datastates.commit.place import Place
from dcp_datastates.config import parse_host_cache_size
from dcp_datastates.dcp.read_requests import aimed, deliver, request_of
from dcp_datastates.errors import (
    CheckpointReplacedError,
    ConfigurationError,
    DataStatesError,
)
from dcp_datastates.format.metadata_objects import metadata_of, opened_from
from dcp_datastates.io.committed import open_nearest
from dcp_datastates.io.engine import DEFAULT_HOST_CACHE_BYTES, engine
from dcp_datastates.io.requests import Request
from dcp_datastates.io.unpickling import unpickled
from dcp_datastates.loading.fit import Answer, Fit
from dcp_datastates.loading.reading import read
from dcp_datastates.loading.stored import Stored
from dcp_datastates.loading.unread import say_unread, unread
from dcp_datastates.loading.wrapper_loading import Wrappers
from dcp_datastates.process.forks import enter
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.ranks.rank_set import rank_set_of
from dcp_datastates.sharing.joint_reads import JointReads, assigned
from dcp_datastates.storage.object_path import (
    AnyPath,
    Location,
    check_opens,
    locate,
    locate_all,
    resolved,
)
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
            over TCP. None: if the path is a URL (but ``ram://``) or in a network file system. See docs/tuning.md.
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
        enter("DataStatesReader()")
        super().__init__()
        if not isinstance(allow_objects, bool):
            raise ConfigurationError(f"allow_objects={allow_objects!r} must be True or False")
        if share_reads is not None and not isinstance(share_reads, bool):
            raise ConfigurationError(f"share_reads={share_reads!r} must be True, False or None")
        self._share_reads = share_reads
        self._joint: JointReads | None = None
        """Of a load that has not begun to read."""
        self._fit = Fit.of({"cast": cast, "unexpected": unexpected, "exclude": exclude})
        self._storage_options = storage_options
        self._places = None if path is None else self._located(path)
        self._allow_objects = allow_objects
        self._host_cache_bytes = parse_host_cache_size(host_cache_size)
        self._metadata: Metadata | None = None
        self._stored: Stored | None = None
        self._failure: DataStatesError | None = None
        self._asked: set[str] | None = None
        """The names in this rank's plan, when it loads alone."""

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

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load, from ``checkpoint_id`` if given."""
        enter("DataStatesReader.reset()")
        self._metadata = self._stored = self._failure = None
        self._withdraw_offer()
        if checkpoint_id is not None:
            self._places = self._located(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's metadata, without running any code from it.

        If this raises, DCP calls it again with ``rank=``, for metadata of that rank alone, which do not exist here. So
        the first error is kept, and :meth:`set_up_storage_reader` raises it, where DCP does not replace it.
        """
        enter("DataStatesReader.read_metadata()")
        if "rank" in kwargs and self._failure is not None:
            return Metadata({})
        try:
            metadata = metadata_of(open_nearest(self._located_places()).table)
        except DataStatesError as error:
            self._failure = error
            raise
        self._failure = None
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = str(uuid.uuid4())
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take over the metadata that DCP's planner uses."""
        enter("DataStatesReader.set_up_storage_reader()")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._metadata = metadata
        self._asked = None
        self._withdraw_offer()
        self._stored = Stored(opened_from(metadata))
        Place(resolved(self._directory())).warn_if_replaced()
        loaded_from(self._located_places())

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note the attempt that this rank is about to read, and, if it shares its reads, which blocks."""
        metadata, table = self._described(), self._opened().table
        self._joint = JointReads(self._share_reads, rank_set_of(None), self._directory())
        tensors = (item for item in plan.items if not self._is_wrapper(item))
        offered = self._joint.offer((request_of(item, metadata) for item in tensors), table)
        plan.storage_data = (table.note.attempt.name, offered)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Coordinator: check that all ranks have seen the same attempt; report the names that no rank reads; say which
        rank reads what several need.

        Raises :class:`IncompatibleStateError` for such names with ``unexpected="error"``.
        """
        noted = [plan.storage_data or (None, b"") for plan in plans]  # a planner may make new ones
        seen = {attempt for attempt, _ in noted}
        if len(seen) > 1:
            raise CheckpointReplacedError(
                f"{self._directory()}: ranks see different attempts ({', '.join(sorted(map(str, seen)))}): "
                f"the checkpoint was replaced meanwhile, or the path is not shared; load again"
            )
        asked = {item.storage_index.fqn for plan in plans for item in plan.items}
        if len(plans) > 1:
            self._check_unread(asked)
        else:
            self._asked = asked
        for plan, share in zip(plans, assigned([each for _, each in noted]), strict=True):
            plan.storage_data = share
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Read and verify the data of the plan, and copy them into the target tensors; returns when done."""
        enter("DataStatesReader.read_data()")
        try:
            self._read_data(plan, planner)
        finally:
            self._withdraw_offer()
        future: TorchFuture[None] = TorchFuture()
        future.set_result(None)
        return future

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        metadata, stored = self._described(), self._opened()
        places = self._located_places()
        if self._asked is not None:
            # This rank loads alone. It may hold an empty shard (with no_dist=True), which is in its state, but not in
            # its plan.
            held = getattr(planner, "state_dict", None)
            self._check_unread(self._asked.union(held if isinstance(held, dict) else ()))
        # A planner may have lost what the first rank has said.
        share = plan.storage_data if isinstance(plan.storage_data, bytes) else b""
        sharing = None if self._joint is None else self._joint.take(share, stored.table)
        native = engine(self._host_cache_bytes)
        safe: set[bytes] = set()  # equal bytes are checked once

        def take(request: Request) -> None:
            if request.dtype is not None:
                deliver(planner, request)
                return
            request.value = data = bytes(request.data)
            if not self._allow_objects and data not in safe:
                said = f"{places[0]}: object {request.name!r}"
                unpickled(io.BytesIO(data), said, allow_objects=False, device="cpu")
                safe.add(data)

        def read_in(requests: list[Request]) -> None:
            read(requests, take, stored.table, places, sharing=sharing, native=native)

        try:
            wrapped = {
                item.dest_index.fqn: item.storage_index.fqn
                for item in plan.items
                if self._is_wrapper(item)
            }
            wrappers = None
            if wrapped:
                state: dict[str, Any] = planner.state_dict  # type: ignore[attr-defined]
                wanted = {name: (old, state[name]) for name, old in wrapped.items()}
                wrappers = Wrappers(wanted, stored, read_in)
                self._say_unread(wrappers.unread)
            with collection_paused():
                items = (item for item in plan.items if not self._is_wrapper(item))
                requests = aimed(items, metadata, planner, self._fit.cast)
            # The planner unpickles whatever it is given. An object that is refused leaves the state as it is.
            objects = [each for each in requests if each.dtype is None]
            read_in(objects)
            for request in objects:
                deliver(planner, request)
            if wrappers is not None:
                wrappers.load(read_in)
            read_in([each for each in requests if each.dtype is not None])
        finally:
            if sharing is not None:
                sharing.end()

    def _withdraw_offer(self) -> None:
        if self._joint is not None:
            self._joint.close()
            self._joint = None

    def _is_wrapper(self, item: ReadItem) -> bool:
        """Whether the item is a wrapper subclass: DCP plans it as an object, for want of metadata of its own."""
        return item.storage_index.fqn in self._opened().wrappers

    def _check_unread(self, asked: set[str]) -> None:
        names = self._opened().names_with_data()
        self._say_unread(unread(names, asked, self._opened().wrappers))

    def _say_unread(self, left: list[str]) -> None:
        names = self._fit.exclude.others(left)
        # With no_dist=True every rank loads alone, most likely the same names: only one rank logs the warning.
        level = logging.WARNING if self._asked is None else once_per_job(logging.WARNING)
        stored = self._described().state_dict_metadata
        say_unread(names, stored, self._directory(), self._fit.unexpected, level)

    def _located(self, path: AnyPath | Sequence[AnyPath]) -> tuple[Location, ...]:
        places = locate_all(path, self._storage_options)
        for place in places:
            check_opens(place)
        return places

    def _located_places(self) -> tuple[Location, ...]:
        if self._places is None:
            raise ConfigurationError(
                "no path to load from: construct DataStatesReader(path), or pass checkpoint_id"
            )
        return self._places

    def _directory(self) -> Location:
        return self._located_places()[0]

    def _opened(self) -> Stored:
        if self._stored is None:
            raise DataStatesError("set_up_storage_reader() was not called before this")
        return self._stored

    def _described(self) -> Metadata:
        assert self._metadata is not None
        return self._metadata
