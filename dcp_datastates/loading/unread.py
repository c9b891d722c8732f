"""What a load leaves unread: the user is told, unless it was meant."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from typing import Final

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.stored_names import is_under
from dcp_datastates.loading.fit import Answer

logger = logging.getLogger(__name__)

_OPTIMIZER: Final = re.compile(r"\.state\.|\.param_groups\.")
_TORCHS_GROUPS: Final = ".param_groups."
"""In the names of an optimizer's settings, if torch's ``state_dict()`` was saved: the manager has other names."""


def unread(names: Iterable[str], asked: Iterable[str], wrappers: Iterable[str]) -> list[str]:
    """Those of the ``names`` that are not ``asked`` for, nor are parts of one of the ``wrappers`` that is."""
    asked = frozenset(asked)
    wrapped = asked.intersection(wrappers)
    rest = [name for name in names if name not in asked]
    return [name for name in rest if not is_under(name, wrapped)] if wrapped else rest


def say_unread(
    names: Collection[str], stored: Collection[str], source: object, answer: Answer, level: int
) -> None:
    """Tell of those of the ``stored`` names that stay unread and were not left out on purpose, in a line at this
    ``level`` of the log.

    Raises :class:`IncompatibleStateError` if the ``answer`` to such names is ``"error"``.
    """
    if answer == "ignore" or not names:
        return
    said = (
        f"{source}: {len(names)} of the {len(stored)} stored tensors and objects stay unread, as the state to load "
        f"into does not have them: {some_of(list(names))}. "
    )
    of_torch = any(_TORCHS_GROUPS in name for name in stored)
    if of_torch and any(_OPTIMIZER.search(name) for name in names):
        said += (
            "The state_dict() of an optimizer is empty before its first step: get_optimizer_state_dict of "
            "torch.distributed.checkpoint.state_dict fills it. "
        )
    said += 'If that is meant, say so: exclude=…, only=…, or unexpected="ignore"'
    if answer == "error":
        raise IncompatibleStateError(said, unexpected=names)
    logger.log(level, "%s", said)
