"""What the driver has heard, in order, by phase."""

from __future__ import annotations

from dataclasses import dataclass, field

from events import Begun, Event, Killed, Phase, Saved, Stepped


@dataclass
class PhaseJournal:
    begun: Begun
    steps: dict[int, Stepped] = field(default_factory=dict)
    saves: dict[int, Saved] = field(default_factory=dict)
    killed: Killed | None = None

    @property
    def newest_committed(self) -> int | None:
        return max(self.saves, default=None)


class Journal:
    """The phases of a demo, keyed by name."""

    def __init__(self) -> None:
        self.phases: dict[Phase, PhaseJournal] = {}

    def note(self, event: Event) -> PhaseJournal:
        """Take ``event`` in; returns the journal of its phase."""
        if isinstance(event, Begun):
            self.phases[event.phase] = PhaseJournal(event)
        phase = self.phases[event.phase]
        if isinstance(event, Stepped):
            phase.steps[event.iteration] = event
        elif isinstance(event, Saved):
            phase.saves[event.iteration] = event
        elif isinstance(event, Killed):
            phase.killed = event
        return phase
