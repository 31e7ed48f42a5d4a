from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.clock import VirtualClock
from headrace.core.errors import BackendFailed, HeadraceError, MethodNotAllowed, NotFound
from headrace.core.events import Delta, Finish, FinishReason, Start, Usage
from headrace.core.request import Endpoint
from headrace.engine.wire import StepStats
from headrace.telemetry import Metrics, Outcome, RequestRecord
from support.backend import request

ROUTERS_READ = {
    "vllm:num_requests_running": set(),
    "vllm:num_requests_waiting": set(),
    "vllm:kv_cache_usage_perc": set(),
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
    "vllm:lora_requests_info": {"max_lora", "waiting_lora_adapters", "running_lora_adapters"},
}


def stats(
    seconds: float = 0.05, *, preemptions: int = 0, queries: int = 0, hits: int = 0
) -> StepStats:
    return StepStats(seconds, 30, 4, 4, 1, 10, 100, preemptions, queries, hits)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", **labels})


def test_routers_find_their_five_gauges() -> None:
    metrics = Metrics()
    engine = metrics.engine("m")
    engine.set_load(3, 2, 0.25, 1000.0)
    engine.set_cache_shape(16, 100)
    families = {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}
    for name, labels in ROUTERS_READ.items():
        assert families[name].type == "gauge"
        (sample,) = families[name].samples
        assert set(sample.labels) == {"model_name", *labels}
    assert value(metrics, "vllm:num_requests_running") == 3
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    shape = {"block_size": "16", "num_gpu_blocks": "100"}
    assert value(metrics, "vllm:cache_config_info", **shape) == 1


def test_a_new_cache_shape_replaces_the_old_one() -> None:
    metrics = Metrics()
    for blocks in (100, 100, 90):
        metrics.engine("m").set_cache_shape(16, blocks)
    found = re.findall(rb'num_gpu_blocks="(\d+)"', metrics.exposition())
    assert found == [b"90"]


def test_steps_are_counted_and_reports_without_a_step_are_not() -> None:
    metrics = Metrics()
    engine = metrics.engine("m")
    engine.on_step(stats(preemptions=1, queries=64, hits=32))
    engine.on_step(stats(preemptions=1, queries=96, hits=32))
    engine.on_step(stats(0.0, preemptions=1, queries=96, hits=32))
    assert value(metrics, "headrace_engine_step_seconds_count") == 2
    assert value(metrics, "headrace_engine_step_tokens_sum") == 68
    assert value(metrics, "headrace_engine_prefill_tokens_total") == 60
    assert value(metrics, "headrace_engine_decode_tokens_total") == 8
    assert value(metrics, "headrace_engine_preemptions_total") == 1
    assert value(metrics, "vllm:prefix_cache_queries_total") == 96
    assert value(metrics, "vllm:prefix_cache_hits_total") == 32


def test_totals_that_begin_again_do_not_take_anything_back() -> None:
    metrics = Metrics()
    engine = metrics.engine("m")
    engine.on_step(stats(queries=100))
    engine.on_restart("the engine process ended by signal 9")
    engine.on_step(stats(queries=40))
    assert value(metrics, "vllm:prefix_cache_queries_total") == 140
    assert value(metrics, "headrace_engine_restarts_total") == 1
    assert b"signal" not in metrics.exposition()


def test_every_outcome_has_its_series_from_the_start() -> None:
    metrics = Metrics()
    metrics.model("m")
    for endpoint in Endpoint:
        for outcome in Outcome:
            labels = {"endpoint": endpoint.value, "outcome": outcome.value}
            assert value(metrics, "headrace_requests_total", **labels) == 0


def test_two_servers_in_one_process_do_not_share_their_books() -> None:
    first, second = Metrics(), Metrics()
    first.engine("m").on_step(stats())
    second.engine("m")
    assert value(second, "headrace_engine_step_seconds_count") == 0


def kinds(base: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]


@pytest.mark.parametrize("kind", kinds(HeadraceError))
def test_every_error_has_an_outcome_of_its_kind(kind: type[HeadraceError]) -> None:
    outcome = Outcome.of_refusal(kind("x"))
    if kind in {HeadraceError, BackendFailed, NotFound, MethodNotAllowed}:
        assert outcome is Outcome.FAILED, "ours, or of no generation endpoint"
    else:
        assert outcome.value.startswith("refused_")


@pytest.mark.parametrize(
    "outcome",
    [Outcome.UNAUTHORIZED, Outcome.TOO_LARGE, Outcome.BODY_TIMEOUT, Outcome.INVALID, Outcome.QUOTA],
)
def test_what_never_got_to_a_model_is_counted_without_one(outcome: Outcome) -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.unrouted(Endpoint.CHAT, outcome)
    labels = {"model_name": "", "endpoint": "chat", "outcome": outcome.value}
    assert value(metrics, "headrace_requests_total", **labels) == 2


def test_several_tokens_in_a_delta_share_its_gap() -> None:
    metrics, clock = Metrics(), VirtualClock()
    record = RequestRecord(request(n=2), "default", clock, metrics)
    record.routed("m")
    record.observe(Start("m", "b", 5, 2))
    record.observe(Delta(0, "prompt", (1, 2, 3), prompt=True))
    clock.advance(1)
    record.observe(Delta(0, "a", (1,)))
    record.observe(Delta(1, "b", (2,)))
    clock.advance(0.3)
    record.observe(Delta(0, "abc", (1, 2, 3)))
    record.observe(Delta(1, "", ()))
    record.observe(Finish(0, FinishReason.STOP))
    record.observe(Finish(1, FinishReason.LENGTH))
    record.observe(Usage(5, 5, 2))
    record.close()
    assert value(metrics, "headrace_time_to_first_token_seconds_sum") == pytest.approx(1)
    assert value(metrics, "headrace_inter_token_latency_seconds_count") == 3
    assert value(metrics, "headrace_inter_token_latency_seconds_sum") == pytest.approx(0.3)
    assert value(metrics, "headrace_generation_tokens_total") == 5
    assert value(metrics, "headrace_cached_tokens_total") == 2
    assert record.outcome is Outcome.LENGTH


def test_what_goes_wrong_after_the_end_changes_nothing() -> None:
    metrics = Metrics()
    record = RequestRecord(request(), "default", VirtualClock(), metrics)
    record.routed("m")
    record.observe(Start("m", "b", 5))
    record.observe(Finish(0, FinishReason.STOP))
    record.observe(Usage(5, 0))
    record.failed(BackendFailed("too late"))
    record.close()
    assert record.outcome is Outcome.STOP
    labels = {"endpoint": "completion", "outcome": "stop"}
    assert value(metrics, "headrace_requests_total", **labels) == 1
    assert value(metrics, "headrace_time_to_first_token_seconds_count") == 0


def test_text_without_token_ids_is_a_first_token_too() -> None:
    metrics, clock = Metrics(), VirtualClock()
    record = RequestRecord(request(), "default", clock, metrics)
    record.routed("m")
    clock.advance(1)
    record.observe(Start("m", "remote", 5))
    record.observe(Delta(0, "a"))
    clock.advance(1)
    record.observe(Delta(0, "b"))
    record.observe(Finish(0, FinishReason.STOP))
    record.observe(Usage(5, 2))
    record.close()
    assert value(metrics, "headrace_time_to_first_token_seconds_count") == 1
    assert value(metrics, "headrace_decode_time_seconds_sum") == pytest.approx(1)
    assert value(metrics, "headrace_generation_tokens_total") == 2
