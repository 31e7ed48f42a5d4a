from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.core.request import PriorityClass
from headrace.scheduling import ClassPolicy, SchedulingPolicy


@pytest.mark.parametrize(
    "change",
    [
        {"kappa": -1.0},
        {"window_s": float("nan")},
        {"partials": 0},
        {"express": 1.0},
        {"tolerance": 0.0},
        {"max_queue": -1},
        {"max_queued_tokens": 0},
        {"retry_least_s": 10.0, "retry_most_s": 1.0},
        {"classes": {}},
    ],
)
def test_nonsense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        replace(SchedulingPolicy(), **change)


@pytest.mark.parametrize(
    "change", [{"ttft_s": 0.0}, {"slack_s": -1.0}, {"guard_s": 0.0}, {"slots": 0.0}, {"slots": 1.1}]
)
def test_a_class_is_checked_too(change: dict[str, Any]) -> None:
    own = SchedulingPolicy().classes[PriorityClass.BATCH]
    with pytest.raises(ValueError, match=r"\w"):
        replace(own, **change)


def test_less_urgent_classes_get_no_more_slots() -> None:
    policy = SchedulingPolicy()
    batch = replace(policy.classes[PriorityClass.BATCH], slots=1.0)
    with pytest.raises(ValueError, match="less urgent"):
        policy.with_class(PriorityClass.BATCH, batch)


def test_a_class_is_swapped_without_touching_the_original() -> None:
    policy = SchedulingPolicy()
    new = ClassPolicy(ttft_s=9.0, slack_s=1.0, guard_s=5.0, slots=0.9, patience=1.0)
    changed = policy.with_class(PriorityClass.STANDARD, new)
    assert changed.classes[PriorityClass.STANDARD] is new
    assert policy.classes[PriorityClass.STANDARD] is not new
    assert changed.key_span_s == 60.0 + policy.cost_cap_s
