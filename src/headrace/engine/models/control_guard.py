"""Keeps control tokens out of reach of those who write messages.

Where a message spells a control token, the spelling is replaced by a mask before the template
sees it. In the rendered text the control tokens still spelled out are therefore the template's;
they are renamed to a secret, the masks give way to what they hid, and a second tokenizer that
knows control tokens by their secret names only encodes the whole. So everything that depends on
neighbours, such as merges and prefix spaces, comes out as for any other text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from tokenizers import Tokenizer

__all__ = ["ControlGuard"]


class ControlGuard:
    """Guards one tokenizer with one template. Safe from any thread.

    Control tokens are the special ones, and those others that look like markup and that the
    template writes, such as `<tool_call>`. The latter are left alone in what an assistant said:
    templates look for them there. `secret` is a hexadecimal number that no client can guess.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        tokenizer: Tokenizer,
        *,
        template_source: str,
        secret: str,
    ) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        markup = [
            token.content
            for token in added
            if not token.special and _is_markup(token.content) and token.content in template_source
        ]
        self._json = tokenizer_json
        self._controls = sorted((*special, *markup), key=len, reverse=True)
        self._any_control = _one_of(self._controls)
        self._any_special = _one_of(sorted(special, key=len, reverse=True))
        # Digits survive JSON, case and whitespace filters of templates.
        number = str(int(secret, 16)).zfill(3 * len(secret) // 2)
        self._masks = {text: f"{number}{place:06d}" for place, text in enumerate(self._controls)}
        self._names = {text: f"<{secret}{place:06d}>" for place, text in enumerate(self._controls)}
        self._unmask = {mask: text for text, mask in self._masks.items()}
        self._mask_or_control = _one_of([*self._unmask, *self._controls])
        # Such a token is found in text that merely normalises to its own.
        self._always = tokenizer.normalizer is not None and any(
            token.normalized and token.content in self._masks for token in added
        )
        self._lock = threading.Lock()
        self._renamed: Tokenizer | None = None

    def is_needed(self, turns: Sequence[Mapping[str, Any]], tools: Any) -> bool:
        """Whether any string in there spells a control token."""
        return self._always or any(
            self._any_control.search(text) for text in _strings((turns, tools))
        )

    def mask_turns(self, turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self._mask_turn(turn) for turn in turns]

    def mask(self, value: Any) -> Any:
        """A copy of plain JSON `value` with every control token in its strings masked."""
        return self._masked(value, self._any_control)

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a text that was rendered from masked messages."""

        def swap(match: re.Match[str]) -> str:
            found = match[0]
            return self._names.get(found) or self._unmask[found]

        text = self._mask_or_control.sub(swap, rendered)
        return self._tokenizer().encode(text, add_special_tokens=False).ids

    def _mask_turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        masked: dict[str, Any] = self.mask(turn)
        if turn.get("role") == "assistant" and "content" in turn:
            masked["content"] = self._masked(turn["content"], self._any_special)
        return masked

    def _masked(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: self._masks[match[0]], value)
        if isinstance(value, Mapping):
            return {
                self._masked(key, pattern): self._masked(item, pattern)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._masked(item, pattern) for item in value]
        return value

    def _tokenizer(self) -> Tokenizer:
        """Made on first need: most conversations spell no control token."""
        with self._lock:
            if self._renamed is None:
                self._renamed = Tokenizer.from_buffer(_renamed(self._json, self._names))
            return self._renamed


def _renamed(tokenizer_json: bytes, names: Mapping[str, str]) -> bytes:
    """The tokenizer with each token in `names` known by its other name only."""
    tokenizer = orjson.loads(tokenizer_json)
    for token in tokenizer["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = tokenizer["model"]
    if isinstance(model["vocab"], Mapping):
        model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if "merges" in model:
        halves = (
            merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]
        )
        model["merges"] = [
            merge for merge in halves if names.keys().isdisjoint((*merge, "".join(merge)))
        ]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    tokenizer["post_processor"] = None
    return orjson.dumps(tokenizer)


def _is_markup(text: str) -> bool:
    return text[0] in "<[" and text[-1] in ">]"


def _one_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Matches the first of `texts` that fits, so longer ones must come first; never nothing."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
