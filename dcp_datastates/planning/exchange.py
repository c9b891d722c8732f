"""What a rank's planner and the coordinator's tell each other, and how a planner learns which save it plans for.

All of it travels inside what DCP gathers and scatters: plans and write results. A rank offers its local plan: by its
digest alone, if the coordinator has it. The coordinator answers with the rank's share: by its digest alone, if the
rank has that. When it has written, the rank tells where its share is: by a digest once more, because that is the same
from save to save, but for the attempt's directory, which it leaves out. So a save that is like an earlier one sends
some bytes each way.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Any, NoReturn

import numpy as np
from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.process.lazily import lazily
from dcp_datastates.staging.fingerprint import Fingerprint
from dcp_datastates.staging.stage import StagedState

__all__ = ["Answer", "Offer", "Report", "Session", "SessionMeta", "Told"]


@dataclass(eq=False)
class Session:
    """One save, as its planner sees it, until :meth:`close`.

    Attributes:
        group: names the ranks that save together.
        rank: this process's among them.
        world: how many they are.
        staged: what was staged; None in a synchronous save, or if DCP has been given the state itself.
        state: the staged state dict with all tensors in it. Asking for it ends the shortcuts.
        taken: whether the planner has been set up with this, and not with the empty dict that DCP has in its place.
        fingerprint: what the state looked like at the :meth:`look`; None if plans for it are not kept.
    """

    group: str
    rank: int
    world: int
    staged: StagedState | None
    state: Callable[[], dict[Any, Any]] | None
    taken: bool = False
    fingerprint: Fingerprint | None = None
    _owned: tuple[bool, ...] | None = None

    def look(self) -> None:
        """Note what the state looks like. In the thread that captured it, before that goes on."""
        if self.staged is not None:
            self.fingerprint = self.staged.fingerprint()

    @property
    def owned(self) -> tuple[bool, ...]:
        """Which staged tensors an optimizer owned at the call; empty without one."""
        if self._owned is None:
            self._owned = () if self.staged is None else self.staged.owned()
        return self._owned

    def close(self) -> None:
        """The state is no longer needed."""
        self.staged = self.state = None


@dataclass
class SessionMeta(StorageMeta):
    """``storage_meta()`` of this package's writer. Stays within the process."""

    session: Session | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Offer:
    """From a rank: its local plan."""

    digest: bytes
    share: bytes
    """Digest of the share that this rank was given for it last time; empty if none."""
    data: bytes | None
    """The encoded plan; None if the coordinator has it."""
    keep: tuple[bytes, ...] = ()
    """With ``data``: the digests of plans that this rank will not send again. All others can go."""

    def __iter__(self) -> NoReturn:
        # What DCP's own planner does first with the planner_data of all ranks.
        raise ConfigurationError(
            "some ranks plan with a DataStatesSavePlanner, and the coordinator does not: pass planners of one "
            "class on all ranks"
        )

    def __reduce__(self) -> Any:
        return Offer, astuple(self)


@dataclass(frozen=True)
class Answer:
    """To a rank: its share of the global plan."""

    whole: bytes
    """Names the global plan in the coordinator's memory."""
    digest: bytes
    data: bytes | None
    """The encoded share; None if the rank has it."""

    def __reduce__(self) -> Any:
        return Answer, astuple(self)


@dataclass(frozen=True, eq=False)
class Report:
    """In the order of the share's items: which file, where in it, how long (bytes).

    ``files`` are name (below the attempt's directory), size in bytes, and offset of the checksum table.
    """

    files: tuple[tuple[str, int, int], ...]
    numbers: Ints
    offsets: Ints
    lengths: Ints

    def encode(self) -> bytes:
        columns = (self.numbers, self.offsets, self.lengths)
        return pickle.dumps((self.files, *(column.tobytes() for column in columns)))

    @staticmethod
    def decode(data: bytes) -> Report:
        files, *columns = pickle.loads(data)  # from a rank of this job, by DCP's own pickles
        return Report(files, *(np.frombuffer(column, np.int64) for column in columns))

    @lazily
    def digest(self) -> bytes:
        return hashlib.blake2b(self.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Told:
    """In place of DCP's write results: a report, by its digest alone if the coordinator has it."""

    digest: bytes
    data: bytes | None
    samples: bytes = b""
    """Of what this rank shares with others; see ``replicas.py``."""

    def __reduce__(self) -> Any:
        return Told, (self.digest, self.data, self.samples)
