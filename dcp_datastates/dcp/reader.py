"""The storage reader: loads a committed checkpoint, verified, at any world size, mesh or placement.

DCP's calls, on each rank: ``read_metadata  set_up_storage_reader  prepare_local_plan
[prepare_global_plan]  read_data``.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future as TorchFuture

from dcp_datastates.commit.place import Place
from dcp_datastates.config import parse_host_cache_size
from dcp_datastates.dcp.packed_reads import PackedReads
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ConfigurationError,
    DataStatesError,
    IncompatibleStateError,
    UnsafeObjectError,
)
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.metadata import Note
from dcp_datastates.format.metadata_objects import metadata_of, names_with_data, note_of
from dcp_datastates.format.stored_names import Box, is_under, wrappers
from dcp_datastates.io.committed import open_nearest, replacement
from dcp_datastates.io.engine import DEFAULT_HOST_CACHE_BYTES, engine
from dcp_datastates.io.restore import restore
from dcp_datastates.io.stored_checkpoint import StoredCheckpoint
from dcp_datastates.loading.fit import Answer, Fit
from dcp_datastates.loading.wrapper_loading import load_wrappers
from dcp_datastates.process.forks import enter
from dcp_datastates.ranks.rank_set import ALONE, rank_set_of
from dcp_datastates.sharing.assignment import Share, assign
from dcp_datastates.sharing.shared_reads import OwnOffer, SharedReads, offer
from dcp_datastates.sharing.where_it_pays import pays
from dcp_datastates.staging.step_gate import release_memory
from dcp_datastates.storage.object_path import (
    AnyPath,
    Location,
    check_opens,
    locate,
    locate_all,
    resolved,
)
from dcp_datastates.tiers.run_identity import loaded_from

__all__ = ["DataStatesReader", "explain_missing"]

logger = logging.getLogger(__name__)

_OPTIMIZER: Final = re.compile(r"\.state\.|\.param_groups\.")
_TORCHS_GROUPS: Final = ".param_groups."
"""In the names of an optimizer's settings, if torch's ``state_dict()`` was saved: the manager has other names."""


class DataStatesReader(StorageReader):
    """Loads checkpoints that :class:`~dcp_datastates.DataStatesWriter` saved.

    Pass it as ``storage_reader=`` to :func:`torch.distributed.checkpoint.load`, with any planner. It reads only the
    bytes that the target state needs (rounded to checksum blocks of 1 MiB), and verifies every byte before it is used.

    Args:
        path: Directory of the checkpoint, or a URL such as ``"s3://bucket/run/step-100"``. A list of them means tiers
            with copies of it, the nearest first: each data file is read from the nearest copy that is undamaged. None
            if every load passes ``checkpoint_id``.
        allow_objects: Whether DCP's ``torch.load`` may unpickle Python objects in the checkpoint; only for checkpoints
            from sources you trust. If False, a load whose plan needs an object fails.
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
        allow_objects: bool = True,
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
        self._offer: OwnOffer | None = None
        """Of a load that has not begun to read."""
        self._fit = Fit.of({"cast": cast, "unexpected": unexpected, "exclude": exclude})
        self._storage_options = storage_options
        self._places = None if path is None else self._located(path)
        self._allow_objects = allow_objects
        self._host_cache_bytes = parse_host_cache_size(host_cache_size)
        self._metadata: Metadata | None = None
        self._note: Note | None = None
        self._failure: DataStatesError | None = None
        self._wrappers: dict[str, dict[str, Box | None]] = {}
        """The wrapper subclasses of which the checkpoint has the parts."""
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
        self._metadata = self._note = self._failure = None
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
        self._note = note_of(metadata)
        self._wrappers = wrappers(metadata.state_dict_metadata)
        Place(resolved(self._directory())).warn_if_replaced()
        loaded_from(self._located_places())

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuse objects unless ``allow_objects``; note the attempt that this rank is about to read, and, if it shares
        its reads, which blocks.
        """
        if not self._allow_objects:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO and not self._is_wrapper(item):
                    raise UnsafeObjectError(
                        f"{item.dest_index.fqn!r} is a pickled Python object and allow_objects=False; "
                        f"load tensors only, or trust the checkpoint with allow_objects=True"
                    )
        metadata, note = self._metadata, self._noted()
        assert metadata is not None
        if self._may_share():
            self._offer = offer(plan.items, metadata, note, rank_set_of(None).host)
        offered = None if self._offer is None else self._offer.offer
        plan.storage_data = (note.attempt.name, offered)
        plan.items = PackedReads(plan.items)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Coordinator: check that all ranks have seen the same attempt; report the names that no rank reads; say which
        rank reads what several need.

        Raises :class:`IncompatibleStateError` for such names with ``unexpected="error"``.
        """
        noted = [
            plan.storage_data or (None, None) for plan in plans
        ]  # a planner may make new plans
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
        shares = assign({rank: each for rank, (_, each) in enumerate(noted) if each is not None})
        for rank, plan in enumerate(plans):
            plan.storage_data = shares.get(rank)
            plan.items = PackedReads(plan.items)
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
        metadata, note = self._metadata, self._noted()
        assert metadata is not None
        places = self._located_places()
        if self._asked is not None:
            # This rank loads alone. It may hold an empty shard (with no_dist=True), which is in its state, but not in
            # its plan.
            self._check_unread(self._asked.union(self._held(planner)))
        native = engine(self._host_cache_bytes)
        sharing = self._sharing(plan.storage_data, metadata, note, places[0])

        def read(plan: LoadPlan, planner: LoadPlanner) -> None:
            source = StoredCheckpoint(metadata, note, places, sharing)
            restore(plan, planner, source, native, self._fit.cast, _release)

        wrapped = {
            item.storage_index.fqn: item.dest_index.fqn
            for item in plan.items
            if self._is_wrapper(item)
        }
        try:
            if wrapped:
                state: dict[str, Any] = planner.state_dict  # type: ignore[attr-defined]
                plan = replace(plan, items=[i for i in plan.items if not self._is_wrapper(i)])
                values = {old: state[name] for old, name in wrapped.items()}
                load_wrappers(values, self._wrappers, metadata, read, self._say_unread)
            read(plan, planner)
        except CheckpointNotFoundError as error:
            raise explain_missing(places[0], note, error) from error
        finally:
            if sharing is not None:
                sharing.end()

    def _sharing(
        self, share: object, metadata: Metadata, note: Note, place: Location
    ) -> SharedReads | None:
        """This rank's shared reads, which take over its offer; None if there is nothing to share."""
        if self._offer is None or not isinstance(share, Share):  # or a planner has lost it
            self._withdraw_offer()  # so that the others are refused at once
            return None
        try:
            sharing = SharedReads(share, self._offer, metadata, note, place)
        except RuntimeError as error:
            logger.warning("this rank shares no reads: the system gives no thread: %s", error)
            self._withdraw_offer()
            return None
        self._offer = None
        return sharing

    def _may_share(self) -> bool:
        share = self._share_reads
        wants = pays(self._directory()) if share is None else share
        return wants and rank_set_of(None) is not ALONE

    def _withdraw_offer(self) -> None:
        if self._offer is not None:
            self._offer.close()
            self._offer = None

    def _is_wrapper(self, item: ReadItem) -> bool:
        """Whether the item is a wrapper subclass: DCP plans it as an object, for want of metadata of its own."""
        return item.storage_index.fqn in self._wrappers

    def _not_left(self, unread: list[str]) -> list[str]:
        """Those of the names of values that are not left unread on purpose."""
        return self._fit.exclude.others(unread)

    def _held(self, planner: LoadPlanner) -> Iterable[str]:
        """The stored names of what is in the planner's state."""
        held = getattr(planner, "state_dict", None)
        return held if isinstance(held, dict) else ()

    def _check_unread(self, asked: set[str]) -> None:
        assert self._metadata is not None
        stored = names_with_data(self._metadata.state_dict_metadata, self._allow_objects)
        wrapped = frozenset(asked.intersection(self._wrappers))
        self._say_unread(
            [name for name in stored if name not in asked and not is_under(name, wrapped)]
        )

    def _say_unread(self, left: list[str]) -> None:
        assert self._metadata is not None
        if self._fit.unexpected == "ignore":
            return
        names = self._not_left(left)
        if not names:
            return
        stored = self._metadata.state_dict_metadata
        said = (
            f"{self._directory()}: {len(names)} of the {len(stored)} stored tensors and objects stay unread, as the "
            f"state to load into does not have them: {some_of(names)}. "
        )
        of_torch = any(_TORCHS_GROUPS in name for name in stored)
        if of_torch and any(_OPTIMIZER.search(name) for name in names):
            said += (
                "The state_dict() of an optimizer is empty before its first step: get_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict fills it. "
            )
        said += 'If that is meant, say so: exclude=…, only=…, or unexpected="ignore"'
        if self._fit.unexpected == "error":
            raise IncompatibleStateError(said, unexpected=names)
        # With no_dist=True every rank loads alone, most likely the same names: only one rank logs the warning.
        first = self._asked is None or not dist.is_initialized() or dist.get_rank() == 0
        logger.log(logging.WARNING if first else logging.INFO, "%s", said)

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

    def _noted(self) -> Note:
        if self._note is None:
            raise DataStatesError("set_up_storage_reader() was not called before this")
        return self._note


def explain_missing(
    directory: Location, note: Note, error: CheckpointNotFoundError
) -> DataStatesError:
    """The error for a data file of the checkpoint ``note`` that is not there: damage, or another save's doing."""
    return replacement(directory, note.attempt, "load") or CheckpointCorruptError(
        f"{error}; the committed checkpoint lacks a data file"
    )


def _release(storages: set[torch.UntypedStorage]) -> None:
    """Return when no save in flight reads the memory that a load is about to overwrite."""
    release_memory(storages, "a load")
