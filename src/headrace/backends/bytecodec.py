"""The simplest codec there is, for backends without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.request import Message

__all__ = ["ByteCodec"]


class ByteCodec:
    """Tokens are bytes; four more control ids make the template. Safe from any thread."""

    BOS = 256
    EOS = 257
    TURN = 258
    END = 259
    vocab_size = 260
    has_chat_template = True

    _names: Mapping[int, str] = {BOS: "<s>", EOS: "</s>", TURN: "<|turn|>", END: "<|end|>"}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([self.BOS] if add_special_tokens else []), *text.encode()]

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Roles, texts and tool calls in turn; `tools` have no place in this template."""
        del tools
        ids: list[int] = []
        for message in messages:
            text = f"{message.role}\n{message.content or ''}"
            for call in message.tool_calls:
                arguments = call["function"]["arguments"].items()
                text += "\n" + " ".join(f"{name}={value}" for name, value in arguments)
            ids += [self.TURN, *text.encode(), self.END]
        return [*ids, self.TURN, *b"assistant\n"] if add_generation_prompt else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        raw = b"".join(
            self._raw(i) for i in token_ids if not (skip_special_tokens and i in self._names)
        )
        return raw.decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self._names.get(token_id) or chr(token_id)

    def _raw(self, token_id: int) -> bytes:
        name = self._names.get(token_id)
        return bytes([token_id]) if name is None else name.encode()
