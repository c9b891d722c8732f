"""What a vote says, as the integers of one all-reduce (elementwise maximum).

Every value that must be the same on all ranks is sent twice, once negated: the two maxima belong
together only if all ranks sent the same.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from dcp_datastates.attempt import Attempt

__all__ = ["Ballot", "Count"]

_MASK = (1 << 62) - 1


@dataclass(frozen=True)
class Ballot:
    """One rank's vote: whether its bytes are durable, and which save it means."""

    ok: bool
    number: int
    attempt: Attempt | None
    directory: Path | None
    world: int
    missed: int = 0

    def encode(self) -> list[int]:
        """First 0 for yes and 1 for no, then each of the values and its negative."""
        values = [0 if self.ok else 1]
        for value in (self.number, *self._identity()):
            values += [value, -value]
        return values

    def _identity(self) -> tuple[int, int, int, int, int]:
        if self.attempt is None:
            return (0, 0, 0, self.world, self.missed)
        # Of the path only its last part: the same directory may be mounted elsewhere on other machines.
        name = "" if self.directory is None else self.directory.name
        digest = int.from_bytes(hashlib.sha1(os.fsencode(name)).digest()[:8], "big")
        incarnation = self.attempt.incarnation & _MASK
        return (incarnation, self.attempt.sequence, digest & _MASK, self.world, self.missed)


@dataclass(frozen=True)
class Count:
    """All ranks' votes together."""

    failed: bool
    agreed: bool

    @staticmethod
    def of(maxima: list[int]) -> Count:
        pairs = zip(maxima[1::2], maxima[2::2], strict=True)
        return Count(maxima[0] != 0, all(value == -negated for value, negated in pairs))

    @property
    def unanimous(self) -> bool:
        """All ranks are durable, and mean the same save."""
        return self.agreed and not self.failed
