"""The messages between a rank's planner and the coordinator, and the session through which a planner knows its save.

The messages travel inside the plans and write results that DCP gathers and scatters. A rank offers its local plan, by
digest alone if the coordinator has cached it. The coordinator answers with the rank's share, by digest alone if the
rank has cached it. After writing, the rank reports the places of its share, by digest again if the coordinator has the
report: a report leaves out the attempt's directory, so it is the same from save to save. So a save whose structure is
unchanged sends a few bytes each way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Any, Final, NoReturn

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.planning.packing import pack, pack_ints, unpack, unpack_ints
from dcp_datastates.process.lazily import lazily
from dcp_datastates.staging.fingerprint import Fingerprint
from dcp_datastates.staging.stage import StagedState

__all__ = ["Answer", "Offer", "RankReport", "Report", "Session", "SessionMeta"]

_REPORT: Final = b"dsre\x01"
_IN_FULL: Final = b"dsto\x01"
_BY_DIGEST: Final = b"dsto\x02"


@dataclass(eq=False)
class Session:
    """One save, as the planner sees it, until :meth:`close`.

    Attributes:
        group: the name of the commit group.
        rank: this process's rank in the group.
        staged: the staged state; None in a synchronous save, or if DCP has received the state itself.
        state: builds the staged state dict with all its tensors. After this call the cached plan is not used for the
            save.
        fingerprint: the state's fingerprint at :meth:`look`; None if plans for it are not cached.
    """

    group: str
    rank: int
    world: int
    staged: StagedState | None
    state: Callable[[], dict[Any, Any]] | None
    fingerprint: Fingerprint | None = None
    _owned: tuple[bool, ...] | None = None
    _taken_by: object = None

    def take(self, planner: object) -> None:
        """Note that ``planner`` was set up with this session, and not with the empty dict that DCP has in its place."""
        self._taken_by = planner

    @property
    def taken_by(self) -> object:
        """The planner that was set up with this session; None so far."""
        return self._taken_by

    def look(self) -> None:
        """Take the fingerprint of the state. The thread that staged the state calls this before it continues."""
        if self.staged is not None:
            self.fingerprint = self.staged.fingerprint()

    @property
    def owned(self) -> tuple[bool, ...]:
        """For each staged tensor, whether an optimizer owned it at the call; empty without a staged state."""
        if self._owned is None:
            self._owned = () if self.staged is None else self.staged.owned()
        return self._owned

    def close(self) -> None:
        """Release the state."""
        self.staged = self.state = None


@dataclass
class SessionMeta(StorageMeta):
    """The result of ``storage_meta()`` of this package's writer. It stays within the process."""

    session: Session | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Offer:
    """A rank's message: its local plan."""

    digest: bytes
    share: bytes
    """Digest of the share that this rank last received for the plan; empty if none."""
    data: bytes | None
    """The encoded plan; None if the coordinator has cached it."""
    keep: tuple[bytes, ...] = ()
    """With ``data``: the digests of plans that this rank will not send again. The coordinator can drop all others."""

    def __iter__(self) -> NoReturn:
        # DCP's own planner begins by iterating over the planner_data of all ranks.
        raise ConfigurationError(
            "some ranks plan with a DataStatesSavePlanner, and the coordinator does not: pass planners of one "
            "class on all ranks"
        )

    def __reduce__(self) -> Any:
        return Offer, astuple(self)


@dataclass(frozen=True)
class Answer:
    """The coordinator's message: the rank's share of the global plan."""

    global_plan: bytes
    """The name of the global plan in the coordinator's cache."""
    digest: bytes
    data: bytes | None
    """The encoded share; None if the rank has cached it."""

    def __reduce__(self) -> Any:
        return Answer, astuple(self)


@dataclass(frozen=True, eq=False)
class Report:
    """The places of a share's items, in their order: file, offset and length (bytes).

    ``files``: name (below the attempt's directory), size in bytes, and offset of the checksum table.
    """

    files: tuple[tuple[str, int, int], ...]
    numbers: Ints
    offsets: Ints
    lengths: Ints

    def encode(self) -> bytes:
        columns = (self.numbers, self.offsets, self.lengths)
        files = json.dumps(self.files).encode()
        return pack(_REPORT, [files, *map(pack_ints, columns)])

    @staticmethod
    def decode(data: bytes | memoryview) -> Report:
        """ValueError: the bytes are not from :meth:`encode`."""
        files, *columns = unpack(_REPORT, 4, data)
        first = unpack_ints(columns[0], -1)
        others = [unpack_ints(column, len(first)) for column in columns[1:]]
        names = tuple((name, nbytes, table) for name, nbytes, table in json.loads(bytes(files)))
        return Report(names, first, *others)

    @lazily
    def digest(self) -> bytes:
        return hashlib.blake2b(self.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class RankReport:
    """What a rank tells of its share that is written: a report, by digest alone if the coordinator has it."""

    digest: bytes
    data: bytes | None
    samples: bytes = b""
    """Samples of the replicas that this rank shares with others; see ``replicas.py``."""

    def encode(self) -> bytes:
        data = [] if self.data is None else [self.data]
        return pack(_IN_FULL if data else _BY_DIGEST, [self.digest, self.samples, *data])

    @staticmethod
    def is_encoded(data: bytes) -> bool:
        """Whether these bytes are from :meth:`encode`."""
        return data.startswith((_IN_FULL, _BY_DIGEST))

    @staticmethod
    def decode(encoded: bytes) -> RankReport:
        """ValueError: the bytes are not from :meth:`encode`."""
        if encoded.startswith(_IN_FULL):
            digest, samples, data = map(bytes, unpack(_IN_FULL, 3, encoded))
            return RankReport(digest, data, samples)
        digest, samples = map(bytes, unpack(_BY_DIGEST, 2, encoded))
        return RankReport(digest, None, samples)

    def __reduce__(self) -> Any:
        return RankReport, (self.digest, self.data, self.samples)
