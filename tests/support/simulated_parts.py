"""What a simulated job is made of besides its ranks: a checkpoint's directory, saves, and groups of connections."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Attempt", "Broken", "Group", "Path", "Save", "Thread"]

Thread = Generator[None, None, None]
Attempt = int


class Broken(AssertionError):
    """Something that must always hold does not."""


@dataclass
class Path:
    """One checkpoint's directory."""

    slots: set[Attempt] = field(default_factory=set)
    files: dict[Attempt, set[int]] = field(default_factory=dict)  # of the attempts that are there
    deleting: set[Attempt] = field(default_factory=set)
    named: Attempt | None = None
    signature: int = 0

    def present(self) -> list[Attempt]:
        return sorted(self.files)


@dataclass
class Save:
    """One save of one job, as its coordinator has claimed it."""

    number: int
    attempt: Attempt
    seen: int


class Group:
    """Connections between all ranks of a job; the k-th operation of each rank meets the k-th of the others."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.operations: list[dict[int, tuple[str, tuple[Any, ...]]]] = []
        self.gone: set[int] = set()

    def begin(self, place: int, rank: int, kind: str, value: tuple[Any, ...]) -> None:
        while len(self.operations) <= place:
            self.operations.append({})
        self.operations[place][rank] = kind, value

    def result(self, place: int, rank: int) -> tuple[Any, ...] | None:
        """What it gives to ``rank``; None as long as it gives nothing."""
        given = self.operations[place]
        kinds = {kind for kind, _ in given.values()}
        if not (kinds <= {"vote"} or kinds <= {"tell", "hear"}):
            raise Broken(f"operations that do not belong together met: {given}")
        if kinds != {"vote"}:  # the coordinator waits for no other, and each other for it
            return given[0][1] if 0 in given else None
        if len(given) < self.world:
            return None
        values = [value for _, value in given.values()]
        return tuple(max(column) for column in zip(*values, strict=True))
