"""A pickler for checkpoint metadata: the same opcodes from every Python."""

from __future__ import annotations

import copyreg
import pickle
from enum import Enum
from typing import IO, Any, Final

from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

__all__ = ["metadata_pickler"]


def _by_value(member: Enum) -> tuple[type[Enum], tuple[Any]]:
    return type(member), (member.value,)


# Python 3.11.0 to 3.11.3 pickle a member as a call of getattr, which no reader of untrusted files may allow.
_REDUCERS: Final[dict[type, Any]] = {_MEM_FORMAT_ENCODING: _by_value}


def metadata_pickler(file: IO[bytes], protocol: int | None = None) -> pickle.Pickler:
    """A ``pickle.Pickler`` that writes members of enumerations by their values."""
    pickler = pickle.Pickler(file, protocol)
    pickler.dispatch_table = copyreg.dispatch_table | _REDUCERS
    return pickler
