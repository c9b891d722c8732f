"""What a simulated job is made of besides its ranks: directories of checkpoints, saves, and connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from dcp_datastates.ranks.gloo_tree import Place

__all__ = ["Attempt", "Broken", "Path", "Save", "Thread", "Tree", "neighbours"]

Thread = Generator[None, None, None]
Attempt = int


class Broken(AssertionError):
    """Something that must always hold does not."""


@dataclass(eq=False)
class Path:
    """One checkpoint's directory, or its prefix in an object store."""

    files: dict[Attempt, set[int]] = field(default_factory=dict)  # of the attempts that are there
    named: Attempt | None = None
    after: Attempt = 0  # the newest attempt that the named one's claim had seen
    signature: int = 0
    decisions: dict[Attempt, str] = field(default_factory=dict)
    pointer: Attempt | None = None  # what .metadata is a copy of
    held_up: Counter[Attempt] = field(default_factory=Counter)  # requests about their decisions
    folders: set[Attempt] = field(default_factory=set)  # in a directory, where alone a file can be


@dataclass(eq=False)
class Save:
    """One save of one job, as its coordinator has claimed it."""

    number: int
    attempt: Attempt
    path: Path = field(default_factory=Path)
    after: Attempt = 0
    # What the claim has seen at the path:
    older: tuple[Attempt, ...] = ()
    alone: bool = True


class Tree:
    """Connections between all ranks of a job: the k-th operation of each member of a group meets the k-th of the
    others.
    """

    def __init__(self) -> None:
        self.connected: set[int] = set()
        self.gone: set[int] = set()
        self._operations: dict[tuple[str, int], dict[int, tuple[str, Any]]] = {}

    def begin(self, place: Place, at: int, kind: str, value: Any) -> None:
        given = self._operations.setdefault((place.name, at), {})
        given[place.rank] = kind, value
        if len({kind for kind, _ in given.values()}) > 1:
            raise Broken(f"operations that do not belong together met: {given}")

    def result(self, place: Place, at: int) -> Any:
        """What it gives to this member; None as long as it gives nothing."""
        given = self._operations[place.name, at]
        kind, mine = given[place.rank]
        if kind != "gather":  # the group's first rank waits for no other, and each other for it
            return given[0][1] if 0 in given else None
        if place.rank:
            return mine
        if len(given) < place.size:
            return None
        return tuple(
            max(column) for column in zip(*(each for _, each in given.values()), strict=True)
        )


def neighbours(rank: int, place: Place) -> list[int]:
    """The ranks of the job in ``rank``'s group at ``place``."""
    return [rank + (member - place.rank) * place.span for member in range(place.size)]
