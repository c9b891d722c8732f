"""Saves as others see them: metrics for Prometheus, and the timeline of a checkpoint's save over its ranks."""

from dcp_datastates.monitoring.metrics import register_metrics
from dcp_datastates.monitoring.trace import chrome_trace, trace_of

__all__ = ["chrome_trace", "register_metrics", "trace_of"]
