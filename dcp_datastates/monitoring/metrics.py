"""Metrics of this process's saves and loads, for Prometheus and what else reads OpenMetrics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.loading.session import listeners as of_loads
from dcp_datastates.results import LOAD_PHASES, PHASES, LoadRecord, SaveRecord
from dcp_datastates.saving.outcome import listeners as of_saves
from dcp_datastates.saving.start import in_flight
from dcp_datastates.tiers.archive import archive_lag

_BUCKETS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Seconds."""

_OUTCOMES: Final = ("committed", "skipped", "abandoned", "unknown", "failed")


def register_metrics(registry: Any = None) -> Callable[[], None]:
    """Count this process's saves and loads, from now on, in a registry of ``prometheus_client``.

    Each rank counts its own, and is a target of its own. docs/monitoring.md lists the metrics.

    Args:
        registry: A ``prometheus_client.CollectorRegistry``; None: the library's default.

    Returns:
        A function that ends this, and removes the metrics from the registry.

    Raises:
        ConfigurationError: ``prometheus_client`` is not installed, or the registry has these metrics already.
    """
    try:
        import prometheus_client  # in the extra "metrics"
    except ImportError as error:
        raise ConfigurationError(
            f"metrics need the package prometheus_client ({error}): pip install 'dcp_datastates[metrics]'"
        ) from error
    shared = prometheus_client.REGISTRY if registry is None else registry
    metrics = _Metrics(prometheus_client)
    undo = contextlib.ExitStack()
    try:
        for each in metrics.collectors:
            shared.register(each)
            undo.callback(shared.unregister, each)
    except ValueError as error:
        undo.close()
        raise ConfigurationError(f"the metrics are registered already: {error}") from error
    undo.callback(of_saves.add(metrics.count))
    undo.callback(of_loads.add(metrics.count_load))
    return undo.close


class _Metrics:
    def __init__(self, library: Any) -> None:
        self.collectors: Final[list[Any]] = []

        def add(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            made = kind(f"dcp_datastates_{name}", text, labels, registry=None, **options)
            self.collectors.append(made)
            return made

        counter, gauge = partial(add, library.Counter), partial(add, library.Gauge)
        histogram = partial(add, library.Histogram, buckets=_BUCKETS)
        self._saves = counter("saves", "Saves whose outcome is known", "outcome")
        self._bytes = counter("saved_bytes", "Bytes of this rank's files in committed checkpoints")
        self._seconds = histogram("save_seconds", "From the call of a save to its commit")
        self._phases = histogram("save_phase_seconds", "Phases of committed saves", "phase")
        self._stalls = counter("stall_seconds", "Time for which training waited", "cause")
        self._waits = counter("backpressure_seconds", "Time that saves waited for room", "cause")
        self._step = gauge("newest_step", "Step of the checkpoint that was committed last")
        self._at = gauge("newest_commit_timestamp_seconds", "When it was committed")
        self._loads = counter("loads", "Loads that have ended", "outcome")
        self._loaded_bytes = counter("loaded_bytes", "Bytes that this rank has read")
        self._load_seconds = histogram("load_seconds", "From the call of a load to its end")
        self._load_phases = histogram("load_phase_seconds", "Phases of loads", "phase")
        gauge("saves_in_flight", "Asynchronous saves without outcome").set_function(
            lambda: len(in_flight())
        )
        gauge("archive_pending", "Committed checkpoints that are to be archived").set_function(
            lambda: archive_lag()[0]
        )
        gauge("archive_lag_seconds", "Age of the oldest of them").set_function(
            lambda: archive_lag()[1]
        )
        self._step.set(math.nan)
        self._at.set(math.nan)
        for outcome in _OUTCOMES:  # so that a rate is 0, and not absent
            self._saves.labels(outcome)
        for phase in PHASES:
            self._phases.labels(phase)
        for ending in ("loaded", "failed"):
            self._loads.labels(ending)
        for phase in LOAD_PHASES:
            self._load_phases.labels(phase)

    def count(self, record: SaveRecord) -> None:
        self._saves.labels(record.outcome).inc()
        self._stalls.labels("call").inc(record.call_seconds)
        self._stalls.labels("gate").inc(record.gate_seconds)
        self._waits.labels("max_in_flight").inc(record.room_seconds)
        self._waits.labels("host_cache").inc(record.cache_seconds)
        if record.outcome != "committed":
            return
        self._bytes.inc(record.written_bytes)
        self._seconds.observe(record.seconds)
        for phase, seconds in record.phases.items():
            self._phases.labels(phase).observe(seconds)
        self._at.set(record.began_at + record.seconds)
        self._step.set(math.nan if record.step is None else record.step)

    def count_load(self, record: LoadRecord) -> None:
        self._loads.labels(record.outcome).inc()
        self._loaded_bytes.inc(record.read_bytes)
        if record.outcome != "loaded":
            return
        self._load_seconds.observe(record.seconds)
        for phase, seconds in record.phases.items():
            self._load_phases.labels(phase).observe(seconds)
