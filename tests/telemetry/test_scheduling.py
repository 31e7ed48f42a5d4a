from __future__ import annotations

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.request import PriorityClass
from headrace.telemetry import Metrics, RequestRecord, SchedulingMetrics
from support.backend import request

NAMES = [c.name.lower() for c in PriorityClass]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def figures(metrics: Metrics) -> SchedulingMetrics:
    return metrics.scheduling("m")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    labels = {"model_name": "m", **labels}
    return metrics.registry.get_sample_value(f"headrace_scheduler_{name}", labels)


def test_waits_are_kept_by_class(metrics: Metrics, figures: SchedulingMetrics) -> None:
    for seconds in (0.5, 2.0):
        figures.waited(PriorityClass.BATCH, seconds)
    assert value(metrics, "wait_seconds_count", priority_class="batch") == 2
    assert value(metrics, "wait_seconds_sum", priority_class="batch") == 2.5
    assert value(metrics, "wait_seconds_bucket", priority_class="batch", le="0.5") == 1
    for name in NAMES[:3]:
        assert value(metrics, "wait_seconds_count", priority_class=name) == 0


def test_a_request_is_a_wait_of_its_class_once(metrics: Metrics) -> None:
    clock = VirtualClock()
    record = RequestRecord(request(), "default", clock, metrics)
    record.routed("m")
    for seconds in (1.0, 2.0):  # the first turn was taken back
        clock.advance(seconds)
        record.turn(PriorityClass.INTERACTIVE)
    record.close()
    assert value(metrics, "wait_seconds_count", priority_class="interactive") == 1
    assert value(metrics, "wait_seconds_sum", priority_class="interactive") == 3.0
    assert metrics.registry.get_sample_value(
        "headrace_queue_time_seconds_sum", {"model_name": "m"}
    ) == pytest.approx(3.0)


def test_a_turn_of_no_class_is_no_wait_of_any(metrics: Metrics) -> None:
    record = RequestRecord(request(), "default", VirtualClock(), metrics)
    record.routed("m")
    record.turn()
    record.close()
    metrics.scheduling("m")
    for name in NAMES:
        assert value(metrics, "wait_seconds_count", priority_class=name) == 0


def test_totals_are_set_and_never_fall(metrics: Metrics, figures: SchedulingMetrics) -> None:
    shed = {("deadline", PriorityClass.BATCH): 2, ("pushed_out", PriorityClass.SYSTEM): 1}
    for _ in range(2):  # the same again changes nothing
        figures.set_classes([1, 2, 3, 4], [1, 1, 2, 3], [0.0, 0.5, 1.0, 9.0])
        figures.set_sheds(shed)
        figures.set_order(overtakes=5, longest_overtake_s=1.5, guard_turns=2, late_turns=3)
        figures.set_taken_back(revoked=4, preempted=1)
        figures.set_decisions(100, 0.004)
    assert [value(metrics, "admitted_total", priority_class=n) for n in NAMES] == [1, 2, 3, 4]
    assert [value(metrics, "turns_total", priority_class=n) for n in NAMES] == [1, 1, 2, 3]
    assert value(metrics, "longest_wait_seconds", priority_class="batch") == 9.0
    assert value(metrics, "sheds_total", reason="deadline", priority_class="batch") == 2
    assert value(metrics, "sheds_total", reason="pushed_out", priority_class="system") == 1
    assert value(metrics, "sheds_total", reason="deadline", priority_class="system") is None
    assert value(metrics, "overtakes_total") == 5
    assert value(metrics, "longest_overtake_seconds") == 1.5
    assert value(metrics, "guard_turns_total") == 2
    assert value(metrics, "late_turns_total") == 3
    assert value(metrics, "revoked_turns_total") == 4
    assert value(metrics, "preemptions_total") == 1
    assert value(metrics, "decisions_total") == 100
    assert value(metrics, "decision_seconds_total") == pytest.approx(0.004)
    figures.set_decisions(10, 0.001)
    assert value(metrics, "decisions_total") == 110, "it has begun again"


def test_figures_come_and_go_with_what_is_known(
    metrics: Metrics, figures: SchedulingMetrics
) -> None:
    gauges = (
        "fairness_jain",
        "length_rank_accuracy",
        "cost_model_error",
        "itl_target_seconds",
        "eta",
        "step_token_budget",
        "running_cap",
    )

    def show(figure: float | None) -> None:
        figures.set_fairness(figure)
        figures.set_forecast(rank_accuracy=figure, coverage_q80=figure, coverage_q90=None)
        figures.set_cost_model_error(figure)
        whole = None if figure is None else 1
        figures.set_batching(itl_target_s=figure, eta=figure, step_tokens=whole, running_cap=whole)

    targets = [None, 2.0, 5.0, 60.0]
    figures.set_ttft_targets(targets)
    names = ("system", "interactive", "standard", "batch")
    shown = [value(metrics, "ttft_target_seconds", priority_class=name) for name in names]
    assert shown == targets

    show(None)
    assert [value(metrics, name) for name in gauges] == [None] * len(gauges)
    show(0.75)
    assert [value(metrics, name) for name in gauges] == [0.75] * 5 + [1, 1]
    assert value(metrics, "length_coverage", quantile="0.8") == 0.75
    assert value(metrics, "length_coverage", quantile="0.9") is None
    show(None)
    assert [value(metrics, name) for name in gauges] == [None] * len(gauges)
    assert value(metrics, "length_coverage", quantile="0.8") is None


def test_models_do_not_share_their_books(metrics: Metrics, figures: SchedulingMetrics) -> None:
    assert metrics.scheduling("m") is figures
    other = metrics.scheduling("other")
    other.set_fairness(0.5)
    figures.set_fairness(None)
    assert value(metrics, "fairness_jain", model_name="other") == 0.5
    assert value(metrics, "fairness_jain") is None


def test_all_of_it_is_valid_to_a_scraper(metrics: Metrics, figures: SchedulingMetrics) -> None:
    figures.set_sheds({("quota", PriorityClass.STANDARD): 1})
    text = metrics.exposition().decode()
    mine = [line for line in text.splitlines() if line.startswith("headrace_scheduler_")]
    assert len(mine) > 20
    assert all('model_name="m"' in line for line in mine)
