"""The phases of a save, by a clock that the test sets."""

import pytest

from dcp_datastates.results import PHASES, Timeline


class _Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return _Clock()


@pytest.fixture
def timeline(clock):
    return Timeline(clock, wall=lambda: 1e9)


def test_each_phase_ends_when_the_next_begins_and_their_sum_is_the_duration(timeline, clock):
    for number, phase in enumerate(PHASES):
        timeline.begin(phase)
        clock.now += number + 1.0
    assert timeline.end()
    clock.now += 100.0
    expected = {phase: number + 1.0 for number, phase in enumerate(PHASES)}
    assert timeline.phases() == expected
    assert list(timeline.phases()) == list(PHASES)
    assert timeline.seconds == sum(expected.values())
    assert (timeline.began_at, timeline.began) == (1e9, 50.0)


def test_a_phase_that_was_left_out_belongs_to_the_one_before(timeline, clock):
    clock.now += 2
    timeline.begin("planning")
    clock.now += 3
    assert timeline.phases() == {"call": 2, "planning": 3}  # so far
    timeline.end()
    assert timeline.phases() == {"call": 2, "planning": 3}


def test_no_phase_begins_again_or_goes_back(timeline, clock):
    timeline.begin("voting")
    clock.now += 1
    timeline.begin("planning")
    timeline.begin("voting")
    assert timeline.phases() == {"call": 0, "voting": 1}


def test_a_phase_is_known_late_but_began_not_before_the_one_before_it(timeline, clock):
    clock.now += 10
    timeline.begin("window")
    clock.now += 4
    timeline.begin("reading", ago=3)
    timeline.begin("flushing")
    clock.now += 5
    timeline.begin("voting", after=2)  # durable two seconds after the last read
    clock.now += 1
    timeline.begin("publishing", ago=99)
    timeline.end()
    assert timeline.phases() == {
        "call": 10,
        "window": 1,
        "reading": 3,
        "flushing": 2,
        "voting": 0,
        "publishing": 4,
    }


def test_what_is_known_after_the_outcome_changes_nothing(timeline, clock):
    clock.now += 2
    assert timeline.end()
    clock.now += 3
    timeline.begin("voting")
    assert not timeline.end()
    assert timeline.seconds == 2
    assert timeline.phases() == {"call": 2, "voting": 0}


def test_the_first_wait_at_the_gate_is_where_it_began(timeline, clock):
    assert timeline.gated_after is None
    clock.now += 5
    timeline.gated(2.0)
    clock.now += 5
    timeline.gated(1.0)
    assert timeline.gated_after == 3.0
