"""What the queue looks like, for those who ask."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.request import PriorityClass
from headrace.scheduling.books import Books

__all__ = ["ClassSnapshot", "FlowSnapshot", "snapshot"]


@dataclass(frozen=True, slots=True)
class FlowSnapshot:
    """One flow in one class. `depth` counts choices admitted and not with the backend, `tokens`
    their uncached prompt tokens, `running` choices with the backend. `oldest_wait_s` is of those
    that wait for their turn. `virtual_s` is work served per weight, which only compares."""

    flow: str
    weight: float
    depth: int
    running: int
    tokens: int
    oldest_wait_s: float
    virtual_s: float


@dataclass(frozen=True, slots=True)
class ClassSnapshot:
    """One priority class. `predicted_wait_s` is what a newcomer would wait, None before it is
    known; `target_s` the time to the first token that it may take, None before it is known."""

    priority_class: PriorityClass
    depth: int
    running: int
    tokens: int
    oldest_wait_s: float
    predicted_wait_s: float | None
    target_s: float | None
    flows: tuple[FlowSnapshot, ...]


def snapshot(books: Books) -> tuple[ClassSnapshot, ...]:
    """Every class, with the flows that have anything waiting or running."""
    now = books.now()
    running = books.slots.by_class_and_flow()
    found = []
    for priority_class in PriorityClass:
        queue = books.queues[priority_class]
        oldest: dict[str, float] = {}
        for entry in queue.waiting():
            oldest[entry.flow] = min(oldest.get(entry.flow, now), entry.arrival)
        flows = tuple(
            FlowSnapshot(
                flow=name,
                weight=flow.weight,
                depth=flow.choices,
                running=running.get((priority_class, name), 0),
                tokens=flow.tokens,
                oldest_wait_s=now - oldest.get(name, now),
                virtual_s=flow.virtual,
            )
            for name, flow in sorted(queue.flows.items())
            if flow.held or (priority_class, name) in running
        )
        target = books.target_s(priority_class)
        found.append(
            ClassSnapshot(
                priority_class=priority_class,
                depth=books.backlog.choices[priority_class],
                running=books.slots.by_class[priority_class],
                tokens=books.backlog.tokens[priority_class],
                oldest_wait_s=now - min(oldest.values(), default=now),
                predicted_wait_s=books.wait_s(priority_class),
                target_s=target if target < float("inf") else None,
                flows=flows,
            )
        )
    return tuple(found)
