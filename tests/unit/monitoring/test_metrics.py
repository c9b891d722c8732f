"""Metrics: what a scrape gets, and that each save counts once."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support.crashes.failing import armed
from support.state.checkpoints import CACHE, async_save, save, writer
from support.waiting import await_that

import dcp_datastates
from dcp_datastates.errors import (
    CheckpointSkipped,
    CommitOutcomeUnknown,
    ConfigurationError,
    DataStatesError,
    SaveAbandonedError,
)
from dcp_datastates.monitoring import register_metrics
from dcp_datastates.ranks.rank_set import ALONE
from dcp_datastates.results import LOAD_PHASES, PHASES, SaveStats
from dcp_datastates.saving.outcome import SaveOrigin, conclude, record_of
from dcp_datastates.tiers import archive

STATE = {"w": torch.arange(100_000.0)}
GRAFANA = Path(__file__).parents[3] / "docs" / "grafana"
ALERTS = yaml.safe_load((GRAFANA / "alerts.yml").read_text())


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    end = register_metrics(registry)
    yield registry
    end()


def _scraped(registry):
    """All samples by name and labels, as a scraper reads them."""
    text = generate_latest(registry).decode()
    return {
        (sample.name.removeprefix("dcp_datastates_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def _saves(registry):
    found = _scraped(registry)
    return {key[1]: value for key, value in found.items() if key[0] == "saves_total" and value}


def test_a_commit_shows_in_every_metric(registry, tmp_path):
    before = _scraped(registry)
    assert math.isnan(before["newest_step",])
    assert before["saves_total", "committed"] == 0
    handle = dcp_datastates.async_save(STATE, tmp_path / "step-12", host_cache_size=CACHE)
    handle.result()
    await_that(lambda: _saves(registry))
    record, found = handle.record, _scraped(registry)
    assert _saves(registry) == {"committed": 1}
    assert found["saved_bytes_total",] == record.written_bytes
    assert found["save_seconds_count",] == 1
    assert found["save_seconds_sum",] == pytest.approx(record.seconds)
    for phase in PHASES:
        assert found["save_phase_seconds_count", phase] == 1
        assert found["save_phase_seconds_sum", phase] == pytest.approx(record.phases[phase])
    assert found["stall_seconds_total", "call"] == pytest.approx(record.call_seconds)
    assert found["stall_seconds_total", "gate"] == 0
    assert found["backpressure_seconds_total", "host_cache"] == record.cache_seconds
    assert found["backpressure_seconds_total", "max_in_flight"] == record.room_seconds
    assert found["newest_step",] == 12
    ended = record.began_at + record.seconds
    assert found["newest_commit_timestamp_seconds",] == pytest.approx(ended, abs=0.001)
    assert found["saves_in_flight",] == 0
    assert (found["archive_pending",], found["archive_lag_seconds",]) == (0, 0)


def test_a_save_in_flight_shows_until_it_is_over(registry, tmp_path):
    parameter = torch.nn.Parameter(torch.ones(1_000_000))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    by = writer(reads=3600)
    handle = dcp_datastates.async_save({"w": parameter}, tmp_path / "c", writer=by)
    assert _scraped(registry)["saves_in_flight",] == 1
    handle.result()
    await_that(lambda: _scraped(registry)["saves_in_flight",] == 0)


def test_each_save_counts_once_by_its_outcome(registry, tmp_path):
    by = writer(reads=3600, when_behind="skip", max_in_flight=1)
    parameter = torch.nn.Parameter(torch.ones(1_000_000))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"w": parameter}
    first = dcp_datastates.async_save(state, tmp_path / "step-1", writer=by)
    second = dcp_datastates.async_save(state, tmp_path / "step-2", writer=by)
    first.result()
    with pytest.raises(CheckpointSkipped):
        second.result()
    with armed("publish.write.before=error:ENOSPC"), pytest.raises(DataStatesError):
        dcp_datastates.save(STATE, tmp_path / "step-3", host_cache_size=CACHE)
    save(STATE, tmp_path / "step-4")
    async_save(STATE, tmp_path / "step-5").result(60)
    with pytest.raises(DataStatesError):  # raised by the call
        async_save(STATE, tmp_path / "step-5", overwrite=False).result(60)
    await_that(lambda: sum(_saves(registry).values()) == 6)
    assert _saves(registry) == {"committed": 3, "skipped": 1, "failed": 2}
    found = _scraped(registry)
    assert found["save_seconds_count",] == 3
    assert found["newest_step",] == 5


def test_loads_show_in_every_metric_of_theirs(registry, tmp_path):
    assert _scraped(registry)["loads_total", "failed"] == 0
    save(STATE, tmp_path / "c")
    dcp_datastates.load(tmp_path / "c", dict(STATE))
    with pytest.raises(DataStatesError):
        dcp_datastates.load(tmp_path / "none")
    found = _scraped(registry)
    assert (found["loads_total", "loaded"], found["loads_total", "failed"]) == (1, 1)
    assert found["loaded_bytes_total",] >= 400_000
    assert found["load_seconds_count",] == 1
    counts = [found["load_phase_seconds_count", phase] for phase in LOAD_PHASES]
    assert counts == [not phase.startswith("wait_") for phase in LOAD_PHASES]
    seconds = sum(found["load_phase_seconds_sum", phase] for phase in LOAD_PHASES)
    assert seconds == pytest.approx(found["load_seconds_sum",])


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "committed"),
        (CheckpointSkipped("late"), "skipped"),
        (SaveAbandonedError("the end"), "abandoned"),
        (CommitOutcomeUnknown("who knows"), "unknown"),
        (KeyError("w"), "failed"),
    ],
)
def test_every_outcome_has_its_count(error, outcome, registry):
    conclude(record_of(SaveOrigin.DCP, ALONE, "best", None, SaveStats(), error), error)
    assert _saves(registry) == {outcome: 1}
    assert math.isnan(_scraped(registry)["newest_step",])  # "best" has none


def test_what_is_to_be_archived_shows_with_its_age(registry, monkeypatch):
    items = [SimpleNamespace(since=archive.time.monotonic() - ago) for ago in (5, 90)]
    monkeypatch.setitem(archive._archives, ("group", None), SimpleNamespace(items=items))
    found = _scraped(registry)
    assert found["archive_pending",] == 2
    assert found["archive_lag_seconds",] == pytest.approx(90, abs=30)


def test_metrics_end_when_they_are_told_to_and_can_begin_anew(tmp_path):
    registry = CollectorRegistry(auto_describe=True)
    end = register_metrics(registry)
    with pytest.raises(ConfigurationError, match="registered already"):
        register_metrics(registry)
    dcp_datastates.save(STATE, tmp_path / "c", host_cache_size=CACHE)
    await_that(lambda: _saves(registry) == {"committed": 1})
    end()
    end()
    assert _scraped(registry) == {}
    end = register_metrics(registry)
    assert _saves(registry) == {}
    end()


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'dcp_datastates\[metrics\]'"):
        register_metrics()


def test_the_dashboard_and_the_alerts_name_what_is_exported(registry):
    """integration/prometheus asks a real Prometheus about them."""
    families = list(registry.collect())
    known = {sample.name for family in families for sample in family.samples}
    known |= {f"{family.name}_total" for family in families if family.type == "counter"}
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len(rules) == 3
    panels = [target for each in dashboard["panels"] for target in each.get("targets", ())]
    for each in (*panels, *rules):
        named = set(re.findall(r"dcp_datastates_\w+", each["expr"]))
        assert named, each
        assert named <= known, each
    used = set(re.findall(r"dcp_datastates_\w+", json.dumps(panels)))
    for family in families:
        assert any(each.startswith(family.name) for each in used), family.name
