"""Asking a model served here, on the server's own behalf and as its least urgent work."""

from __future__ import annotations

import itertools
from contextlib import aclosing

from headrace.caching import Controls
from headrace.core.clock import Clock
from headrace.core.errors import BackendUnavailable
from headrace.core.events import Delta
from headrace.core.request import Endpoint, Message, PriorityClass, Request, SamplingParams
from headrace.gateway.claims import Terms
from headrace.gateway.gateway import Gateway
from headrace.gateway.tenants import Tenant

__all__ = ["Judging"]

_TENANT = Tenant("headrace", default_class=PriorityClass.BATCH, highest_class=PriorityClass.BATCH)
_TERMS = Terms(cache=Controls(mode="exact"))
_LONGEST_REPLY = 16


class Judging:
    """Greedy replies of a few tokens. `gateway` is set once there is one."""

    def __init__(self, model: str, clock: Clock) -> None:
        self.gateway: Gateway | None = None
        self._model = model
        self._clock = clock
        self._numbers = itertools.count(1)

    async def ask(self, prompt: str) -> str:
        """What the model says. Raises HeadraceError."""
        if self.gateway is None:
            raise BackendUnavailable("The server is not up yet.")
        request = Request(
            id=f"judge-{next(self._numbers)}",
            endpoint=Endpoint.CHAT,
            model=self._model,
            sampling=SamplingParams(temperature=0.0, max_tokens=_LONGEST_REPLY),
            arrival=self._clock.monotonic(),
            messages=(Message("user", prompt),),
        )
        async with aclosing(self.gateway.generate(request, _TENANT, _TERMS)) as events:
            return "".join([e.text async for e in events if isinstance(e, Delta)])
