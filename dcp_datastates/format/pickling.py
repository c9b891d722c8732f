"""A pickler for checkpoint metadata: the same opcodes from every Python, for every torch."""

from __future__ import annotations

import copyreg
import pickle
from enum import Enum
from typing import IO, Any, Final

from torch.distributed.checkpoint import metadata

from dcp_datastates.dcp.fields import portable

__all__ = ["metadata_pickler"]


def _by_value(member: Enum) -> tuple[type[Enum], tuple[Any]]:
    return type(member), (member.value,)


# Python 3.11.0 to 3.11.3 pickle a member as a call of getattr, which no reader of untrusted files may allow.
_ENUMS: Final = [
    each
    for each in vars(metadata).values()
    if isinstance(each, type) and issubclass(each, Enum) and each is not Enum
]
_REDUCERS: Final[dict[type, Any]] = {
    **dict.fromkeys(_ENUMS, _by_value),
    metadata.TensorProperties: portable,
}


def metadata_pickler(file: IO[bytes], protocol: int | None = None) -> pickle.Pickler:
    """A ``pickle.Pickler`` that writes members of enumerations by their values, and the properties of tensors without
    the fields that not every torch has (:func:`~dcp_datastates.dcp.fields.portable`).
    """
    pickler = pickle.Pickler(file, protocol)
    pickler.dispatch_table = copyreg.dispatch_table | _REDUCERS
    return pickler
