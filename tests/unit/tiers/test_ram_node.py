"""How fast a process sends."""

from __future__ import annotations

import pytest

from dcp_datastates.tiers import ram_node
from dcp_datastates.tiers.ram_node import Pace


class _Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = _Clock()
    monkeypatch.setattr(ram_node, "time", made)
    return made


def test_pieces_are_sent_at_the_rate(clock):
    pace = Pace(1000)
    for _ in range(11):
        pace.take(100)
    assert clock.now == pytest.approx(101.0)
    clock.now += 60
    pace.take(100)
    assert clock.now == pytest.approx(161.0), "idle time is not saved up, and costs nothing"
    pace.take(100)
    assert clock.now == pytest.approx(161.1)


def test_no_rate_is_no_limit(clock):
    pace = Pace(0)
    for _ in range(5):
        pace.take(1 << 30)
    assert clock.now == 100.0
