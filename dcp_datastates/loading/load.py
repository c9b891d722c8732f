"""``load``: fills a state, on all ranks; or returns a nested dict, in this process alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from dcp_datastates.config import check_options, parse_flag
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.stored_names import is_under
from dcp_datastates.io.committed import open_nearest
from dcp_datastates.io.reads import Reads
from dcp_datastates.loading.fit import Fit, FitOptions
from dcp_datastates.loading.fitting import Fitting
from dcp_datastates.loading.session import LoadSession, Step, load_session, refuse
from dcp_datastates.loading.stored import Stored
from dcp_datastates.loading.wrapper_loading import Wrappers
from dcp_datastates.process.forks import public
from dcp_datastates.ranks.rank_set import ALONE, check_group, rank_set_of
from dcp_datastates.sharing.shared_reads import JointReads, assigned
from dcp_datastates.storage.object_path import AnyPath, locate_all
from dcp_datastates.tiers.run_identity import loaded_from

DEFAULT_TIMEOUT: Final = 300.0
"""How long a load waits for another rank that makes no progress, in seconds."""

Prepare = Callable[[Stored], Fitting]
"""Makes what fits the state to a checkpoint that was opened."""


@public("load()")
def load(
    path: AnyPath | Sequence[AnyPath],
    state: dict[str, Any] | None = None,
    only: str | Iterable[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
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
        share_reads: As for :class:`~dcp_datastates.DataStatesReader`. Without ``state``, it has no effect.
        storage_options: As for :class:`~dcp_datastates.DataStatesReader`.
        timeout: With ``state``: seconds for which this rank waits for another one that does not come, or makes no
            progress. A wait is logged after five seconds, with the ranks that are missing.
        options: :class:`FitOptions`: ``exclude``, ``rename``, ``allow_objects``, ``missing``, ``unexpected``, ``cast``.
            Without ``state``, the last three have no effect.

    Returns:
        ``state``, or the new dict.

    Raises:
        ConfigurationError: an argument cannot work, on this rank or another.
        IncompatibleStateError: the checkpoint has no value under one of ``only`` (the error lists similar names), or
            ``state`` does not fit the checkpoint: the error has all names, shapes and dtypes that differ.
        CheckpointNotFoundError, CheckpointCorruptError, CheckpointReplacedError, UnsafeObjectError, StorageError:
            as for :class:`~dcp_datastates.DataStatesReader`. If ranks fail differently, all raise the same error. It
            says so if the state is half loaded, or may be.
        RankLostError: a rank died, was cut off, or did not come within ``timeout``.
        DataStatesError: anything else that failed on a rank, which the message names.
    """
    check_group(process_group)
    rank_set = ALONE if state is None else rank_set_of(process_group, no_dist)
    try:
        check_options("load", options, FitOptions)
        if path is None:
            raise ConfigurationError(
                "path=None: load(path, state) needs the checkpoint's directory; latest() returns None if it finds none"
            )
        if share_reads is not None:
            parse_flag("share_reads", share_reads)
        if not timeout > 0:
            raise ConfigurationError(f"timeout={timeout!r} must be a number of seconds above 0")
        fit = Fit.of(options, only)
        places = locate_all(path, storage_options)
        if state is not None and not isinstance(state, dict):
            raise ConfigurationError(
                f"state is a {type(state).__name__}; pass a dict of names to tensors, objects and dicts"
            )
    except Exception as error:
        refuse(rank_set, path, "load()", error, DEFAULT_TIMEOUT)
        raise
    into: dict[str, Any] = {} if state is None else state

    def prepare(stored: Stored) -> Fitting:
        fitting = Fitting(fit, stored)
        if state is None:
            names = fitting.names.items()
            into.update({name: stored.new(old) for name, old in names if old in stored})
        return fitting

    with load_session(rank_set, places, "load()", timeout) as session:
        fitting = load_with(session, into, prepare, share_reads)
    return fitting.nested(into) if state is None else into


def load_with(
    session: LoadSession,
    state: dict[str, Any],
    prepare: Prepare,
    share_reads: bool | None = None,
) -> Fitting:
    """Load into ``state``, all ranks of the ``session`` together: what ``prepare`` makes, and this returns, chooses
    what.

    ``prepare`` runs once all ranks have opened the checkpoint, and before a ``state_dict()`` is called.
    """
    joint = JointReads(share_reads, session.rank_set, session.places[0])
    this = _Load(session, joint)
    try:
        this.open()
        this.fit(state, prepare)
        this.read()
        joint.close(all_have_read=True)
    finally:
        joint.close()
    given = dict(state)
    for name, value in this.loaded.items():
        before = given[name]
        if _is_stateful(before):
            before.load_state_dict(value)
        elif value is not before and name in state:
            state[name] = value
    return this.fitting


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, DTensor, dict, list, int, float, str, bytes)
"""Types that are not ``Stateful``: to ask takes 20 us."""


def load_values(
    stored: Stored, names: Collection[str], allow_objects: bool = False
) -> dict[str, Any]:
    """The objects stored under ``names``, by these, in this process alone. Raises as :func:`load`."""
    fitting = Fitting(Fit(allow_objects=allow_objects), stored)
    if names:
        stored.read(stored.objects(list(names)), fitting.unpickle)
    return fitting.objects


# ---- one load, step by step --------------------------------------------------------------------------


class _Load:
    """One load of this rank, step by step."""

    stored: Stored
    fitting: Fitting
    _wrappers: Wrappers

    def __init__(self, session: LoadSession, joint: JointReads) -> None:
        self.loaded: dict[str, Any] = {}
        """The state, with the ``state_dict()`` of each ``Stateful`` in its place."""
        self._session, self._joint = session, joint

    def open(self) -> None:
        """Open the checkpoint. All ranks see the same attempt."""
        session = self._session

        def work() -> bytes:
            self.stored = Stored(open_nearest(session.places).table, session.places)
            loaded_from(session.places)
            session.attempt = self.stored.table.note.attempt.name
            return session.attempt.encode()

        def answer(attempts: Sequence[bytes]) -> Sequence[bytes]:
            self.stored.check_attempts(map(bytes.decode, attempts))
            return attempts

        session.end(Step.OPEN, work, answer)

    def fit(self, state: dict[str, Any], prepare: Prepare) -> None:
        """Fit the state. Each rank notes which stored values it takes, a bit for each, and what it can read for others;
        the first rank looks for those that no rank takes.
        """

        def work() -> bytes:
            stored = self.stored
            self.fitting = fitting = prepare(stored)
            for name in sorted(state, key=str):  # state_dict() may be a collective of the job's
                value = state[name]
                self.loaded[name] = value.state_dict() if _is_stateful(value) else value
                if getattr(type(value), "load_state_dict", None) is torch.nn.Module.load_state_dict:
                    check_memory(self.loaded[name], fitting.names, f"{name}.")
            self._objects, self._tensors = reads = fitting.reads(self.loaded)
            self._session.asked_bytes = sum(int(each.nbytes.sum()) for each in reads)
            asked = stored.marks(fitting.held)
            self._wrappers = Wrappers(fitting.wrapped, stored, self._read)
            asked &= ~stored.marks(self._wrappers.unread)
            offer = self._joint.offer(lambda: Reads.joined(reads), stored.table)
            return np.packbits(asked).tobytes() + offer

        def answer(notes: Sequence[bytes]) -> Sequence[bytes]:
            count = len(self.stored)
            nbytes = -(-count // 8)
            bits = [np.frombuffer(each[:nbytes], np.uint8) for each in notes]
            asked = np.unpackbits(np.bitwise_or.reduce(bits), count=count).view(np.bool_)
            self.fitting.tell_unread(self.stored.unread(asked), alone=len(notes) == 1)
            return assigned([each[nbytes:] for each in notes])

        share = self._session.end(Step.FIT, work, answer)
        self._joint.take(share, self.stored.table)

    def read(self) -> None:
        """Read this rank's part. No rank reads before all states fit, and none changes its state before all have
        unpickled their objects.
        """

        def tensors() -> None:
            self._wrappers.load()
            self._read(self._tensors)
            self.fitting.deliver()

        if self.stored.table.catalog.object_rows:
            self._session.end(Step.OBJECTS, lambda: self._read(self._objects))
        self._session.end(Step.READ, tensors)

    def _read(self, reads: Reads) -> None:
        sharing, count = self._joint.sharing, self._session.count
        self.stored.read(reads, self.fitting.unpickle, sharing=sharing, count=count)


def _is_stateful(value: Any) -> bool:
    return type(value) not in _PLAIN and isinstance(value, Stateful)


def check_memory(state: Mapping[str, Any], stored: Iterable[str], prefix: str = "") -> None:
    """Raise :class:`ConfigurationError` if a model with this ``state_dict()`` has no memory for one of the ``stored``
    names, which begin with ``prefix``: it would not keep the value.
    """
    values = state.items()
    empty = frozenset(prefix + key for key, v in values if getattr(v, "is_meta", False))
    if any(is_under(name, empty) for name in stored):
        raise ConfigurationError(
            "the model is on the meta device; give it memory before the restore, with model.to_empty(device=…)"
        )
