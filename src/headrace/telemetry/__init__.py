"""What the server tells its operator: metrics and logs, never prompts, answers or keys."""

from __future__ import annotations

from headrace.telemetry.caching import CachingMetrics
from headrace.telemetry.embedding import EmbeddingMetrics
from headrace.telemetry.engine import EngineMetrics
from headrace.telemetry.logs import configure_logging, log_request
from headrace.telemetry.metrics import EXPOSITION_TYPE, Metrics, ModelMetrics
from headrace.telemetry.outcome import Outcome
from headrace.telemetry.record import RequestRecord
from headrace.telemetry.scheduling import SchedulingMetrics

__all__ = [
    "EXPOSITION_TYPE",
    "CachingMetrics",
    "EmbeddingMetrics",
    "EngineMetrics",
    "Metrics",
    "ModelMetrics",
    "Outcome",
    "RequestRecord",
    "SchedulingMetrics",
    "configure_logging",
    "log_request",
]
