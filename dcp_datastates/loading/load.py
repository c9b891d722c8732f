"""``load``: fills a state, on all ranks; or returns a nested dict, in this process alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from dcp_datastates.commit.place import Place
from dcp_datastates.config import check_options
from dcp_datastates.errors import (
    CheckpointReplacedError,
    ConfigurationError,
)
from dcp_datastates.format.key_paths import nested
from dcp_datastates.format.stored_names import renamed_path
from dcp_datastates.io.committed import open_nearest
from dcp_datastates.io.requests import Request
from dcp_datastates.loading.fit import Fit, FitOptions
from dcp_datastates.loading.fitting import Fitting
from dcp_datastates.loading.reading import read
from dcp_datastates.loading.session import LoadSession, Step, load_session
from dcp_datastates.loading.stored import Stored
from dcp_datastates.loading.unread import say_unread, unread
from dcp_datastates.loading.wrapper_loading import Wrappers
from dcp_datastates.planning.packing import Message
from dcp_datastates.process.forks import enter
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.ranks.rank_set import ALONE, RankSet, check_group, rank_set_of
from dcp_datastates.sharing.joint_reads import JointReads, assigned
from dcp_datastates.sharing.shared_reads import SharedReads
from dcp_datastates.storage.object_path import (
    AnyPath,
    Location,
    check_opens,
    locate_all,
    resolved,
)
from dcp_datastates.tiers.run_identity import loaded_from

DEFAULT_TIMEOUT: Final = 300.0
"""How long a load waits for another rank that makes no progress, in seconds."""

Prepare = Callable[[Stored], Fitting]
"""Makes what fits the state to a checkpoint that was opened."""


def load(
    path: AnyPath | Sequence[AnyPath],
    state: dict[str, Any] | None = None,
    only: str | Iterable[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_objects: bool = False,
    share_reads: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    **options: Unpack[FitOptions],
) -> dict[str, Any]:
    """Load the checkpoint at ``path`` into ``state``, or into a new dict if ``state`` is None.

    With ``state``, all ranks of the group call this, at any world size, mesh or placement, as they would call
    :func:`torch.distributed.checkpoint.load`. It fills tensors in place, replaces objects, and passes the loaded values
    to ``Stateful`` objects. It loads only the values whose names are in ``state``. (:meth:`CheckpointManager.restore`
    also loads what is stored below a dict or an object of the state.) If ``state`` does not fit on a rank, it stays
    unchanged on every rank. The ranks talk at the job's store: no collective of ``process_group`` runs, and no memory
    of a GPU is used but that of ``state``.

    Without ``state``, the call needs no other rank: it returns the state as it was saved at any world size, nested,
    with full tensors on the CPU, which must fit in memory.

    Every byte read is verified.

    Args:
        path: Directory of the checkpoint, or a URL such as ``"s3://bucket/run/step-100"``. A list of them means tiers,
            as ``latest([...])`` returns: each file is read from the nearest undamaged copy.
        state: The state to load into. None makes a new dict.
        only: Load only the values under these names: full names, or prefixes that end before a dot, such as ``"model"``
            or ``"model.layers.0"``; ``*`` stands for any text. In lists, skipped elements before a loaded one are None.
        process_group: With ``state``: the ranks that load together; default: all.
        no_dist: With ``state``: this process loads alone, even if there are process groups.
        allow_objects: As for :class:`~dcp_datastates.DataStatesReader`.
        share_reads: As for :class:`~dcp_datastates.DataStatesReader`. Without ``state``, it has no effect.
        storage_options: As for :class:`~dcp_datastates.DataStatesReader`.
        timeout: With ``state``: seconds for which this rank waits for another one that does not come, or makes no
            progress. A wait is logged after five seconds, with the ranks that are missing.
        options: :class:`FitOptions`: ``exclude``, ``rename``, ``missing``, ``unexpected``, ``cast``. Without ``state``,
            the last three have no effect.

    Returns:
        ``state``, or the new dict.

    Raises:
        ConfigurationError: an argument cannot work.
        IncompatibleStateError: the checkpoint has no value under one of ``only`` (the error lists similar names), or
            ``state`` does not fit the checkpoint: the error has all names, shapes and dtypes that differ.
        CheckpointNotFoundError, CheckpointCorruptError, CheckpointReplacedError, UnsafeObjectError, StorageError:
            as for :class:`~dcp_datastates.DataStatesReader`. If ranks fail differently, all raise the same error. It
            says so if the state is half loaded, or may be.
        RankLostError: a rank died, was cut off, or did not come within ``timeout``.
        DataStatesError: anything else that failed on a rank, which the message names.
    """
    enter("load()")
    check_options("load", options, FitOptions)
    check_group(process_group)
    if path is None:
        raise ConfigurationError("path=None: load(path, state) needs the checkpoint's directory")
    for name, value in (("allow_objects", allow_objects), ("share_reads", share_reads)):
        if not isinstance(value, bool) and (name, value) != ("share_reads", None):
            raise ConfigurationError(f"{name}={value!r} must be True or False")
    if not timeout > 0:
        raise ConfigurationError(f"timeout={timeout!r} must be a number of seconds above 0")
    fit = Fit.of(options, only)
    places = locate_all(path, storage_options)
    for place in places:
        check_opens(place)
    if state is None:
        return _everything(fit, places, path, allow_objects)
    if not isinstance(state, dict):
        raise ConfigurationError(
            f"state is a {type(state).__name__}; pass a dict of names to tensors, objects and dicts"
        )
    rank_set = ALONE if no_dist else rank_set_of(process_group)
    with load_session(rank_set, places[0], "load()", timeout) as session:
        load_with(
            session,
            places,
            state,
            lambda stored: Fitting(fit, stored, path, allow_objects=allow_objects),
            rank_set,
            share_reads,
        )
    return state


def load_with(
    session: LoadSession,
    places: Sequence[Location],
    state: dict[str, Any],
    prepare: Prepare,
    rank_set: RankSet,
    share_reads: bool | None = None,
) -> None:
    """Load into ``state``, all ranks of the ``session`` together: what ``prepare`` makes chooses what.

    ``prepare`` runs once all ranks have opened the checkpoint, and before a ``state_dict()`` is called.
    """
    before = dict(state)
    this = _Load(session, tuple(places), rank_set, share_reads)
    try:
        this.open()
        loaded = this.fit(state, prepare)
        this.read()
    finally:
        this.end()
    for name, value in loaded.items():
        if _is_stateful(before[name]):
            before[name].load_state_dict(value)
        elif value is not before[name] and name in state:
            state[name] = value


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, DTensor, dict, list, int, float, str, bytes)
"""Types that are not ``Stateful``: to ask takes 20 us."""


def load_values(
    places: Sequence[Location], stored: Stored, names: Iterable[str], allow_objects: bool = False
) -> dict[str, Any]:
    """The values stored under ``names``, by these, in this process alone. Raises as :func:`load`."""
    wanted = list(names)
    if not wanted:
        return {}
    fit = Fit.of({"unexpected": "ignore"}, wanted)
    fitting = Fitting(fit, stored, places[0], allow_objects=allow_objects)
    values = _places_for(fitting)
    requests = fitting.requests(values)
    read(requests, fitting.unpickle, stored.table, places)
    fitting.deliver(requests)
    return values


def _everything(
    fit: Fit, places: tuple[Location, ...], source: object, allow_objects: bool
) -> dict[str, Any]:
    fit = replace(fit, unexpected="ignore")
    with load_session(ALONE, places[0], "load()", DEFAULT_TIMEOUT) as session:
        this = _Load(session, places, ALONE, False)
        this.open()
        fitting = Fitting(fit, this.stored, source, allow_objects=allow_objects)
        values = this.fit(_places_for(fitting), lambda stored: fitting)
        this.read()
    stored = this.stored
    paths = {n: renamed_path(stored.path_of(old), old, n) for n, old in fitting.names.items()}
    return nested(values, paths)


def _places_for(fitting: Fitting) -> dict[str, Any]:
    """New tensors to load into, by name; None for an object."""
    found: dict[str, Any] = {}
    for name, old in fitting.names.items():
        if old in fitting.stored:
            entry = fitting.stored[old]
            new = (
                None if entry is None else torch.empty(entry.size, dtype=entry.dtype, device="cpu")
            )
            found[name] = new
    return found


# ---- one load, step by step --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fitted(Message):
    """What a rank tells the first one when its state fits."""

    digest: bytes
    """Of the names that it loads."""
    offer: bytes
    """What it can read for others."""


@dataclass(frozen=True)
class _Begin(Message):
    """The first rank's answer to one rank."""

    names_differ: bool
    """Whether the ranks load different names: each step of a load is one of all ranks."""
    names_wanted: bool
    """Whether this rank is to tell its names; it is the first with these."""
    share: bytes
    """What it reads for others, and they for it."""


class _Load:
    """One load of this rank, step by step."""

    stored: Stored

    def __init__(
        self,
        session: LoadSession,
        places: tuple[Location, ...],
        rank_set: RankSet,
        share_reads: bool | None,
    ) -> None:
        self._session = session
        self._places = places
        self._joint = JointReads(share_reads, rank_set, places[0])
        self._requests: list[Request] = []
        self._wrappers: Wrappers | None = None
        self._share = b""
        self._sharing: SharedReads | None = None

    def open(self) -> None:
        """Open the checkpoint. All ranks see the same attempt."""

        def work() -> bytes:
            self.stored = Stored(open_nearest(self._places).table)
            Place(resolved(self._places[0])).warn_if_replaced()
            loaded_from(self._places)
            self._session.account.attempt = self.stored.table.note.attempt.name
            return self._session.account.attempt.encode()

        def answer(attempts: Sequence[bytes]) -> Sequence[bytes]:
            if len(seen := set(attempts)) > 1:
                names = ", ".join(sorted(each.decode() for each in seen))
                raise CheckpointReplacedError(
                    f"{self._places[0]}: ranks see different attempts ({names}): the checkpoint was replaced "
                    f"meanwhile, or the path is not shared; load again"
                )
            return [b""] * len(attempts)

        self._session.end(Step.OPEN, work, answer)

    def fit(self, state: dict[str, Any], prepare: Prepare) -> dict[str, Any]:
        """Fit the state; returns it with the ``state_dict()`` of each ``Stateful`` in its place."""
        loaded: dict[str, Any] = {}
        asked: list[str] = []

        def work() -> bytes:
            self._fitting = fitting = prepare(self.stored)
            for name in sorted(state, key=str):  # state_dict() may be a collective of the job's
                value = state[name]
                loaded[name] = value.state_dict() if _is_stateful(value) else value
            self._requests = fitting.requests(loaded)
            self._session.account.requests = self._requests
            if wrapped := fitting.wrapped:
                self._wrappers = Wrappers(wrapped, self.stored, self._read)
                self._say_unread(self._wrappers.unread)
            asked.extend(sorted(fitting.held))
            digest = blake2b("\0".join(asked).encode(), digest_size=16).digest()
            return _Fitted(digest, self._joint.offer(self._requests, self.stored.table)).encode()

        def answer(messages: Sequence[bytes]) -> Sequence[bytes]:
            fitted = list(map(_Fitted.decode, messages))
            with_digest = {each.digest: rank for rank, each in reversed(list(enumerate(fitted)))}
            if len(with_digest) == 1:
                self._check_unread(asked)
            shares = assigned([each.offer for each in fitted])
            return [
                _Begin(len(with_digest) > 1, with_digest[each.digest] == rank, share).encode()
                for rank, (each, share) in enumerate(zip(fitted, shares, strict=True))
            ]

        begin = _Begin.decode(self._session.end(Step.FIT, work, answer))
        if begin.names_differ:
            self._compare(asked if begin.names_wanted else [])
        self._share = begin.share
        return loaded

    def _compare(self, asked: Sequence[str]) -> None:
        """Of ranks that load different names: look for those that no rank loads."""

        def answer(messages: Sequence[bytes]) -> Sequence[bytes]:
            self._check_unread({name for each in messages for name in json.loads(each)})
            return [b""] * len(messages)

        self._session.end(Step.NAMES, lambda: json.dumps(list(asked)).encode(), answer)

    def read(self) -> None:
        """Read this rank's part. No rank reads before all states fit, and none changes its state before all have
        unpickled their objects.
        """

        def objects() -> bytes:
            self._read([each for each in self._requests if each.dtype is None])
            return b""

        def tensors() -> bytes:
            self._fitting.begin()
            if self._wrappers is not None:
                self._wrappers.load(self._read)
            self._read([each for each in self._requests if each.dtype is not None])
            self._fitting.deliver(self._requests)
            return b""

        self._sharing = self._joint.take(self._share, self.stored.table)
        if self.stored.has_objects:
            self._session.end(Step.OBJECTS, objects, _no_answers)
        self._session.end(Step.READ, tensors, _no_answers)

    def end(self) -> None:
        """Release what this rank has for others."""
        self._joint.close()
        if self._sharing is not None:
            self._sharing.end()

    def _read(self, requests: list[Request]) -> None:
        take, table, count = self._fitting.unpickle, self.stored.table, self._session.count
        read(requests, take, table, self._places, sharing=self._sharing, count=count)

    def _check_unread(self, asked: Collection[str]) -> None:
        self._say_unread(unread(self.stored.names_with_data(), asked, self.stored.wrappers))

    def _say_unread(self, left: Collection[str]) -> None:
        answer = self._fitting.fit.unexpected
        if answer == "ignore":
            return
        # With no_dist=True every rank loads alone, most likely the same names.
        alone = self._session.world == 1
        level = once_per_job(logging.WARNING) if alone else logging.WARNING
        say_unread(self._fitting.unasked(left), self.stored, self._places[0], answer, level)


def _no_answers(notes: Sequence[bytes]) -> Sequence[bytes]:
    return [b""] * len(notes)


def _is_stateful(value: Any) -> bool:
    return type(value) not in _PLAIN and isinstance(value, Stateful)
