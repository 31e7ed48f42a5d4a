"""Scheduling settings shown and changed as JSON: all or nothing, and faults by name."""

from __future__ import annotations

import json

import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.request import PriorityClass
from headrace.gateway.tuning import Tuning
from headrace.scheduling import SchedulingPolicy

TUNING = Tuning(SchedulingPolicy(max_queue=7))


def test_what_is_shown_can_be_sent_back_as_it_is() -> None:
    shown = json.loads(json.dumps(TUNING.shown()))
    assert shown["itl_target_s"] == "auto"
    assert shown["max_queue"] == 7
    assert shown["classes"]["batch"]["ttft_s"] == 60.0
    assert TUNING.changed(shown) == TUNING


def test_named_settings_change_and_all_others_stay() -> None:
    changed = TUNING.changed(
        {
            "itl_target_s": 0.25,
            "kappa": 0,
            "auto_targets": False,
            "classes": {"interactive": {"ttft_s": 3}},
        }
    )
    assert changed.itl_target_s == 0.25
    assert (changed.policy.kappa, changed.policy.auto_targets) == (0, False)
    before, after = TUNING.policy.classes, changed.policy.classes
    assert after[PriorityClass.INTERACTIVE].ttft_s == 3.0
    assert after[PriorityClass.INTERACTIVE].slack_s == before[PriorityClass.INTERACTIVE].slack_s
    assert after[PriorityClass.BATCH] == before[PriorityClass.BATCH]
    assert changed.policy.max_queue == 7
    assert changed.changed({"itl_target_s": "auto"}).itl_target_s is None
    assert changed.changed({}) == changed


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"kapa": 1}, "kapa"),
        ({"kappa": "1"}, "kappa"),
        ({"kappa": True}, "kappa"),
        ({"kappa": float("nan")}, "kappa"),
        ({"kappa": None}, "kappa"),
        ({"kappa": -1}, None),
        ({"guard_every": 1.5}, "guard_every"),
        ({"auto_targets": 1}, "auto_targets"),
        ({"itl_target_s": 0}, "itl_target_s"),
        ({"itl_target_s": "fast"}, "itl_target_s"),
        ({"itl_target_s": []}, "itl_target_s"),
        ({"classes": []}, "classes"),
        ({"classes": {"urgent": {}}}, "classes.urgent"),
        ({"classes": {"batch": 3}}, "classes.batch"),
        ({"classes": {"batch": {"ttft": 3}}}, "classes.batch.ttft"),
        ({"classes": {"batch": {"ttft_s": "3"}}}, "classes.batch.ttft_s"),
        ({"classes": {"batch": {"ttft_s": 0}}}, "classes.batch"),
        ({"classes": {"system": {"slots": 0.1}}}, None),
        ({"kappa": 3, "nonsense\n" + "x" * 500: 1}, "nonsense" + "x" * 55),
    ],
)
def test_a_fault_is_named_and_nothing_changes(
    changes: dict[str, object], param: str | None
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        TUNING.changed(changes)
    assert refusal.value.param == param
