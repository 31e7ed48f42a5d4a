"""The front's text codec: a tokenizer, a chat template, and a guard between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from headrace.core.clock import Entropy, SystemEntropy
from headrace.core.errors import InvalidRequest
from headrace.core.request import Message
from headrace.engine.models.chat_template import ChatTemplate
from headrace.engine.models.control_guard import ControlGuard

if TYPE_CHECKING:
    from headrace.engine.models.tokenizer import TokenizerBundle
    from headrace.engine.wire import ModelInfo

__all__ = ["TokenizerCodec"]

_MAX_ID = 2**32


class TokenizerCodec:
    """Implements headrace.core.codec.TextCodec from a tokenizer.json. Safe from any thread.

    A conversation is encoded as `transformers` does it, without the tokenizer's own BOS or EOS:
    the template writes what the model wants. Where a message, a tool or a tool call spells a
    control token, that spelling is encoded as ordinary text.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        self._template = (
            ChatTemplate(chat_template, bos_token=bos_token, eos_token=eos_token)
            if chat_template
            else None
        )
        self._guard = ControlGuard(
            tokenizer_json,
            self._tokenizer,
            template_source=chat_template or "",
            secret=(entropy or SystemEntropy()).token(16),
        )
        bos_id = None if bos_token is None else self._tokenizer.token_to_id(bos_token)
        around_nothing = self._tokenizer.encode("").ids
        self._added_bos = bos_id if around_nothing[:1] == [bos_id] else None

    @classmethod
    def from_bundle(cls, bundle: TokenizerBundle) -> TokenizerCodec:
        """The codec of a model read from disk."""
        return cls(
            bundle.tokenizer_json,
            chat_template=bundle.chat_template,
            bos_token=bundle.bos_token,
            eos_token=bundle.eos_token,
        )

    @classmethod
    def from_info(cls, info: ModelInfo) -> TokenizerCodec:
        """The codec of the model that the engine process has loaded."""
        return cls(
            info.tokenizer,
            chat_template=info.chat_template,
            bos_token=info.bos_token,
            eos_token=info.eos_token,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Control tokens spelled in raw text count as such: the caller writes the whole prompt."""
        ids = self._tokenizer.encode(sound(text), add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._added_bos is not None:
            doubled = ids[:2] == [self._added_bos, self._added_bos]
            return ids[1:] if doubled else ids
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        template = self._template
        if template is None:
            raise InvalidRequest(
                "messages: this model has no chat template; the server needs --chat-template, "
                "or send the text to /v1/completions",
                param="messages",
            )
        turns = [_turn(message) for message in messages]
        plain_tools = None if tools is None else [_plain(tool) for tool in tools]
        if not self._guard.is_needed(turns, plain_tools):
            text = _render(template, turns, plain_tools, add_generation_prompt)
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        text = _render(
            template,
            self._guard.mask_turns(turns),
            None if plain_tools is None else self._guard.mask(plain_tools),
            add_generation_prompt,
        )
        return self._guard.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if any(not 0 <= token_id < _MAX_ID for token_id in token_ids):
            raise InvalidRequest("tokens: a token id is outside the vocabulary", param="tokens")
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        if not 0 <= token_id < _MAX_ID:
            return ""
        return self._tokenizer.id_to_token(token_id) or ""


def sound(text: str) -> str:
    """`text` with each lone surrogate, which UTF-8 cannot hold, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _turn(message: Message) -> dict[str, Any]:
    """The message as templates see it: what is absent is left out."""
    fields = {
        "role": message.role,
        "content": message.content,
        "name": message.name,
        "tool_calls": list(message.tool_calls) or None,
        "tool_call_id": message.tool_call_id,
    }
    return {name: _plain(value) for name, value in fields.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return sound(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _render(
    template: ChatTemplate,
    turns: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
) -> str:
    """Templates differ in how they take a turn without content, such as one that only calls
    tools: absent as `transformers` leaves it or, where that fails, empty."""
    try:
        return template.render(turns, tools=tools, add_generation_prompt=add_generation_prompt)
    except InvalidRequest:
        if all("content" in turn for turn in turns):
            raise
    filled = [{"content": "", **turn} for turn in turns]
    return template.render(filled, tools=tools, add_generation_prompt=add_generation_prompt)
