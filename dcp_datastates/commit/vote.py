"""A vote, as the integers of one reduction (elementwise maximum)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from dcp_datastates.storage.attempt import Attempt

__all__ = ["Ballot", "is_unanimous"]


@dataclass(frozen=True)
class Ballot:
    """One rank's vote: whether its bytes are durable, and which save it votes for.

    ``missed``: calls of ``dcp.async_save`` that failed on this rank before they reached a writer.
    """

    ok: bool
    number: int
    attempt: Attempt | None
    directory: Path | None
    world: int
    missed: int = 0

    def encode(self) -> list[int]:
        """First 0 for yes or 1 for no; then a digest of the save, and the digest's negative."""
        digest = self._digest()
        return [0 if self.ok else 1, digest, -digest]

    def _digest(self) -> int:
        # Only the last part of the path: other machines may mount the directory elsewhere.
        name = b"" if self.directory is None else os.fsencode(self.directory.name)
        attempt = None if self.attempt is None else astuple(self.attempt)
        save = repr((self.number, attempt, name, self.world, self.missed))
        return int.from_bytes(hashlib.sha1(save.encode()).digest()[:8], "big") >> 2


def is_unanimous(maxima: Sequence[int]) -> bool:
    """Whether the maxima of all ranks' votes show that all are durable and vote for the same save.

    The maxima of a digest and of its negative match only if all ranks sent the same digest.
    """
    no, digest, negated = maxima
    return not no and digest == -negated
