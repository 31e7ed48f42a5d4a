"""Where one request's outputs wait for its reader."""

from __future__ import annotations

import asyncio

from headrace.core.errors import HeadraceError
from headrace.engine.wire import Output

__all__ = ["Mailbox", "merge"]


def merge(first: Output, then: Output) -> Output:
    """Two successive outputs of one sequence as one. Takes over the lists of `first`."""
    token_ids = first.token_ids
    token_ids += then.token_ids
    logprobs = first.logprobs
    if then.logprobs is not None:
        logprobs = then.logprobs if logprobs is None else logprobs + then.logprobs
    return Output(
        seq=then.seq,
        started=first.started or then.started,
        cached_tokens=first.cached_tokens or then.cached_tokens,
        prompt_text=then.prompt_text if first.prompt_text is None else first.prompt_text,
        prompt_logprobs=(
            then.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs
        ),
        text=first.text + then.text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish=then.finish,
        stop=then.stop,
        error=then.error,
        invalid=then.invalid,
    )


class Mailbox:
    """One slot a sequence and one wake-up for them all. One reader, on the event loop.

    A reader that lags finds the outputs merged, so memory is bounded by the answer itself.
    `seqs` are consecutive, in the order of the request's choices.
    """

    __slots__ = ("_failure", "_slots", "_waiter", "open_seqs", "seqs")

    def __init__(self, seqs: range) -> None:
        self.seqs = seqs
        self.open_seqs = set(seqs)
        """Sequences that have not ended; kept by the client."""
        self._slots: dict[int, Output] = {}
        self._failure: HeadraceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        waiting = self._slots.get(output.seq)
        self._slots[output.seq] = output if waiting is None else merge(waiting, output)
        self._wake()

    def fail(self, error: HeadraceError) -> None:
        """Ends the reading with `error`, after what is already in the slots."""
        self._failure = error
        self._wake()

    async def take(self) -> list[Output]:
        """Everything new, at most one output a sequence. Waits until there is some."""
        while not self._slots:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs = list(self._slots.values())
        self._slots.clear()
        return outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
