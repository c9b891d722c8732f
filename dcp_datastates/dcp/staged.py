"""The staged state dict: what ``stage()`` gives DCP in place of the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dcp_datastates.errors import ConfigurationError

__all__ = ["StagedStateDict"]


class StagedStateDict(Mapping[Any, Any]):
    """The state at the call, as DCP's thread sees it: built in full when first looked at.

    ``begin`` runs once, in the thread that first looks (DCP's, which thereby becomes the thread of this
    save) and returns the state dict. Until then it is a token. It cannot be pickled; who tries is told
    why, and ``abandon`` is called.
    """

    def __init__(
        self, begin: Callable[[], dict[Any, Any]], abandon: Callable[[BaseException], None]
    ) -> None:
        self._begin: Callable[[], dict[Any, Any]] | None = begin
        self._abandon = abandon
        self._staged: dict[Any, Any] = {}

    def _state(self) -> dict[Any, Any]:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self._staged = begin()
        return self._staged

    def __getitem__(self, key: Any) -> Any:
        return self._state()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state())

    def __len__(self) -> int:
        return len(self._state())

    def __reduce__(self) -> Any:
        error = ConfigurationError(
            "a state staged by DataStatesWriter lives in this process and cannot be sent to another: "
            "use async_checkpointer_type=AsyncCheckpointerType.THREAD (the default); "
            "AsyncCheckpointerType.PROCESS is not supported"
        )
        self._abandon(error)
        raise error
