"""How fast a process sends."""

from types import SimpleNamespace

import pytest

from dcp_datastates.tiers import pace
from dcp_datastates.tiers.pace import Pace


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_pieces_are_sent_at_the_rate(clock):
    sending = Pace(1000)
    for _ in range(11):
        clock.now += sending.delay(100)
    assert clock.now == pytest.approx(101.0)
    clock.now += 60
    assert sending.delay(100) == 0.0, "idle time is not saved up, and costs nothing"
    assert sending.delay(100) == pytest.approx(0.1)


def test_no_rate_is_no_limit(clock):
    sending = Pace()
    assert [sending.delay(1 << 30) for _ in range(5)] == [0.0] * 5
