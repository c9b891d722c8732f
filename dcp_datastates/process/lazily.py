"""Properties that are computed at first access, without a lock.

Up to Python 3.11, ``functools.cached_property`` holds one lock for all objects of a class while it computes. In a child
that is forked meanwhile, the lock would never be released.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

__all__ = ["lazily"]

T = TypeVar("T")


class lazily(Generic[T]):
    """A property that is stored in the object once computed. Two threads at once may compute it twice."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> lazily[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: object | None, kind: type) -> lazily[T] | T:
        if owner is None:
            return self
        value = vars(owner)[self._name] = self._compute(
            owner
        )  # from now on, attribute lookup finds this value first
        return value
