"""Text to tokens and back, as the front sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.core.request import Message

__all__ = ["TextCodec"]


class TextCodec(Protocol):
    """A model's tokenizer and chat template. Pure CPU work, safe from any thread.

    Control tokens come only from the template and from `add_special_tokens`; a chat message that
    spells one is encoded as ordinary text.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of raw text. With `add_special_tokens` the model's own BOS or EOS is added,
        once: text that already begins with BOS does not get a second one."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Raises InvalidRequest if the template refuses it."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def token_text(self, token_id: int) -> str:
        """The token as its vocabulary entry reads, for /tokenize."""
        ...
