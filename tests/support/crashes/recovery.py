"""After a crash: is what can be loaded a checkpoint that a job committed, whole?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from support.crashes.crash_states import CrashState, Disk, Tree, crash_states
from support.crashes.traces import Record
from support.state.checkpoints import causes

__all__ = ["Finding", "Recovery", "Verdicts"]

Verdict = int | None | str
"""The number of the checkpoint that loads, None if there is none, or why what is there does not load."""


@dataclass(frozen=True)
class Finding:
    """A state that must not be: how it came about, and what is wrong with it."""

    state: CrashState
    after: Record | None
    why: str

    def __str__(self) -> str:
        files = "\n".join(
            f"    {path} {'/' if content is None else f'{len(content)} bytes'}"
            for path, content in sorted(self.state.tree.items())
        )
        return f"crash point {self.state.point}, after {self.after}: {self.why}; on disk:\n{files}"


@dataclass
class Verdicts:
    """What enumerating a trace came to."""

    points: int = 0
    states: int = 0
    distinct: set[bytes] = field(default_factory=set)
    loaded: Counter[str] = field(default_factory=Counter)
    """Distinct states by what they load as."""
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.points} crash points, {self.states} states, {len(self.distinct)} distinct: "
            + ", ".join(f"{count} load as {what}" for what, count in sorted(self.loaded.items()))
        )


class Recovery:
    """Loads every state that a crash may leave, each one once, however many traces it comes from."""

    def __init__(self, root: Path, number_at: Callable[[Path], int | None]) -> None:
        """``number_at`` says which checkpoint is in the tree below a directory; it may raise."""
        self._disk = Disk(root)
        self._number_at = number_at
        self._known: dict[bytes, Verdict] = {}

    def check(
        self,
        start: Tree,
        records: Sequence[Record],
        before: int | None,
        after: int | None,
        *,
        first: bool = False,
    ) -> Verdicts:
        """Every state must load as checkpoint ``before`` or ``after`` (None: none): as ``after`` once a rank was told.

        ``first``: stop at the first finding.
        """
        verdicts = Verdicts()
        points = set()
        for state in crash_states(start, records):
            points.add(state.point)
            verdicts.states += 1
            key = state.key
            verdict = self._verdict(key, state.tree)
            if key not in verdicts.distinct:
                verdicts.distinct.add(key)
                verdicts.loaded[_name(verdict)] += 1
            why = _why(verdict, before, after, bool(state.told))
            if why:
                record = records[state.point - 1] if state.point else None
                verdicts.findings.append(Finding(state, record, why))
                if first:
                    break
        verdicts.points = len(points)
        return verdicts

    def _verdict(self, key: bytes, tree: Tree) -> Verdict:
        if key not in self._known:
            self._disk.become(tree)
            try:
                self._known[key] = self._number_at(self._disk.root)
            except (Exception, CheckpointException) as error:  # DCP's is a BaseException
                self._known[key] = "; ".join(f"{type(c).__name__}: {c}" for c in causes(error))
        return self._known[key]


def _name(verdict: Verdict) -> str:
    if isinstance(verdict, str):
        return "broken"
    return "none" if verdict is None else f"checkpoint {verdict}"


def _why(verdict: Verdict, before: int | None, after: int | None, told: bool) -> str:
    if isinstance(verdict, str):
        return verdict
    if told and verdict != after:
        return f"a rank was told that checkpoint {after} is committed; {_name(verdict)} is there"
    if verdict not in (before, after):
        return f"{_name(verdict)} is there, neither {before} nor {after}"
    return ""
