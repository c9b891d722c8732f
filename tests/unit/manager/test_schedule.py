"""When a save is due: the rules as given, and the interval that follows from costs."""

import pytest
from support.state.checkpoints import raises

from dcp_datastates import AutoInterval
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.manager.schedule import Cost, CostMeter, choose, parse_every


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (100, 100),
        ("10min", 600.0),
        ("90s", 90.0),
        ("auto", AutoInterval()),
        (AutoInterval(0.02, "6h"), AutoInterval(0.02, "6h")),
    ],
    ids=str,
)
def test_an_interval_is_steps_or_a_time_or_automatic(given, rule):
    parsed = parse_every(given)
    assert parsed == rule
    assert type(parsed) is type(rule)


@pytest.mark.parametrize("given", [0, -1, True, None, 1.5, "often", "0s", "100"], ids=str)
def test_an_interval_that_cannot_work_is_refused(given):
    with raises(ConfigurationError, "every"):
        parse_every(given)


@pytest.mark.parametrize(
    "options", [{"stall_budget": 0}, {"stall_budget": 1}, {"mtbf": "never"}], ids=str
)
def test_a_budget_that_cannot_work_is_refused(options):
    with raises(ConfigurationError, next(iter(options))):
        AutoInterval(**options)


@pytest.mark.parametrize(
    ("rule", "cost", "steps", "why"),
    [
        # 0.5 s of stall are 1 % of 50 s, that is of 50 steps of a second
        (AutoInterval(0.01), Cost(1.0, 0.5, 10.0), 50, "budget"),
        (AutoInterval(0.05), Cost(1.0, 0.5, 5.0), 10, "budget"),
        # the stall is small, but storage needs 30 steps
        (AutoInterval(0.01), Cost(1.0, 0.01, 30.0), 30, "committed after 30 s"),
        # sqrt(2 * 0.5 s * 6 h) is 147 s
        (AutoInterval(0.01, "6h"), Cost(1.0, 0.5, 10.0), 147, "failure comes every 6 h"),
        # failures are so frequent that the budget is the longer one
        (AutoInterval(0.01, "10min"), Cost(1.0, 0.5, 10.0), 50, "budget"),
        (AutoInterval(0.5), Cost(10.0, 0.01, 0.1), 1, "a step takes 10 s"),
    ],
    ids=str,
)
def test_the_interval_follows_from_the_costs(rule, cost, steps, why):
    chosen = choose(rule, cost)
    assert chosen.steps == steps
    assert why in str(chosen)


def measured(*, stall=0.0, call=0.0, quiet=1.0, steps=4, flush=3.5):
    """A meter that has seen two saves, of which the second counts."""
    meter = CostMeter()
    for _ in range(2):
        for _ in range(8):
            meter.step(quiet)
        meter.begin_save()
        for _ in range(steps):
            meter.step(quiet + stall / steps)
        meter.end_save(call, flush)
    return meter


def test_a_save_costs_its_call_and_what_the_steps_until_its_commit_take_longer():
    cost = measured(stall=0.8, call=0.2).cost()
    assert cost.step == pytest.approx(1.0)
    assert cost.stall == pytest.approx(1.0)
    assert cost.flush == pytest.approx(3.5)


def test_steps_that_happen_to_be_quicker_do_not_make_a_save_cheaper_than_its_call():
    assert measured(stall=-0.8, call=0.2).cost().stall == pytest.approx(0.2)


def test_the_first_save_and_failed_ones_do_not_count():
    meter = CostMeter()
    meter.step(1.0)
    for flush in (9.0, None, None):
        assert meter.cost() is None
        meter.begin_save()
        meter.step(9.0)
        meter.end_save(9.0, flush)
    assert meter.cost() is None
    meter.begin_save()
    meter.end_save(0.5, 2.0)
    assert meter.cost() == Cost(1.0, 0.5, 2.0)


def test_a_step_with_a_save_in_flight_is_no_measure_of_a_quiet_one():
    # Of 56 steps, 16 are quiet.
    assert measured(stall=100.0, steps=20).cost().step == pytest.approx(1.0)
