"""What a class may wait on this machine.

The policy's targets suit a fast accelerator. A machine that needs a minute to serve one full batch
would refuse, by a target of two seconds, nearly all that it can serve. So with automatic targets

    target[class] = max(ttft_s, patience * turnover)

where the turnover is what this machine needs to replace a full batch by another: the time to
prefill as many typical prompts as it runs at once, or the time a choice stays, if that is longer.
Clients that each send one request and wait for it then never wait longer than their number
divided by the running cap, in turnovers; so with a patience of four the standard class is refused
beyond some four times the cap. More urgent classes are refused sooner: who asks for a prompt answer
would rather know at once.
Until the machine has been measured nothing is late and nothing refused by prediction; the hard
limits on the queue always hold. Operators who set absolute targets get exactly these. Slack and
guards stay as they are: they say who goes first, not who is refused.
"""

from __future__ import annotations

import math

from headrace.core.request import PriorityClass
from headrace.scheduling.policy import SchedulingPolicy
from headrace.scheduling.speed import BackendSpeed

__all__ = ["target_s", "turnover_s"]


def turnover_s(speed: BackendSpeed, capacity: int) -> float | None:
    """Seconds to replace a full batch; None before it is known."""
    if speed.prefill_rate is None or speed.prompt_tokens is None or speed.residence_s is None:
        return None
    return max(capacity * speed.prompt_tokens / speed.prefill_rate, speed.residence_s)


def target_s(
    policy: SchedulingPolicy, priority_class: PriorityClass, speed: BackendSpeed, capacity: int
) -> float:
    """The time to the first token that a request of the class may take; inf before it is known."""
    own = policy.classes[priority_class]
    if not policy.auto_targets:
        return own.ttft_s
    turnover = turnover_s(speed, capacity)
    return math.inf if turnover is None else max(own.ttft_s, own.patience * turnover)
