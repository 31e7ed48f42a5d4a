"""A model's tokenizer and chat template, as found beside its weights.

Whatever the source, the result is one tokenizer.json: whether BOS or EOS is added is part of its
post-processor, so the bytes alone can travel to another process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from headrace.engine.models.errors import ModelError
from headrace.engine.vocabulary import decoder_scheme

__all__ = ["TokenizerBundle", "added_token", "load_tokenizer", "template_post_processor"]


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """Everything textual of a model.

    `tokenizer_json` is complete: `add_bos` and `add_eos` say what its post-processor does.
    `eos_token_ids` are all ids that end an answer, the EOS token's first.
    """

    tokenizer_json: bytes
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    add_eos: bool
    eos_token_ids: tuple[int, ...]


def load_tokenizer(path: Path, *, chat_template: str | None = None) -> TokenizerBundle:
    """Reads a .gguf file or a folder with tokenizer.json.

    `chat_template` is the text of a template that replaces the model's own. Raises ModelError,
    naming what is missing or not supported, a template that does not compile included.
    """
    bundle = _load(path, chat_template)
    if bundle.chat_template:
        from headrace.engine.models.chat_template import ChatTemplate  # noqa: PLC0415 - jinja2

        ChatTemplate(bundle.chat_template)
    return bundle


def _load(path: Path, chat_template: str | None) -> TokenizerBundle:
    if path.is_dir():
        return _Folder(path).bundle(chat_template)
    if path.suffix.lower() == ".gguf":
        from headrace.engine.models import gguf_tokenizer  # noqa: PLC0415 - it imports this module

        return gguf_tokenizer.load_gguf_tokenizer(path, chat_template=chat_template)
    raise ModelError(f"{path.name} is neither a model folder nor a .gguf file")


def template_post_processor(
    bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> dict[str, Any] | None:
    """The post-processor that puts `bos` before and `eos` after a text; None if neither."""
    if bos is None and eos is None:
        return None
    added = {"before": bos, "after": eos}
    special = {
        token: {"id": token, "ids": [token_id], "tokens": [token]}
        for token, token_id in filter(None, added.values())
    }

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        before, after = (
            [{"SpecialToken": {"id": token[0], "type_id": type_id}}] if token else []
            for token in (bos, eos)
        )
        return [*before, {"Sequence": {"id": sequence, "type_id": type_id}}, *after]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": special,
    }


class _Folder:
    """A model folder in the layout of the Hugging Face hub."""

    def __init__(self, path: Path) -> None:
        self._path = path
        tokenizer = self._json("tokenizer.json")
        if tokenizer is None:
            raise ModelError(f"{path.name} holds no tokenizer.json")
        self._tokenizer = tokenizer
        self._config = {
            **(self._json("special_tokens_map.json") or {}),
            **(self._json("tokenizer_config.json") or {}),
        }

    def bundle(self, chat_template: str | None) -> TokenizerBundle:
        decoder_scheme(self._tokenizer.get("decoder"))
        self._add_tokens()
        self._tokenizer["truncation"] = None
        self._tokenizer["padding"] = None
        bos, eos = self._named("bos_token"), self._named("eos_token")
        add_bos, add_eos = self._settle_post_processor(bos, eos)
        return TokenizerBundle(
            tokenizer_json=orjson.dumps(self._tokenizer),
            chat_template=chat_template or self._chat_template(),
            bos_token=bos,
            eos_token=eos,
            add_bos=add_bos,
            add_eos=add_eos,
            eos_token_ids=self._eos_token_ids(eos),
        )

    def _json(self, name: str) -> dict[str, Any] | None:
        file = self._path / name
        if not file.is_file():
            return None
        try:
            content = orjson.loads(file.read_bytes())
        except (orjson.JSONDecodeError, OSError) as error:
            raise ModelError(f"{name} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise ModelError(f"{name} does not hold a JSON object")
        return content

    def _named(self, name: str) -> str | None:
        """A special token's text; the files spell it as a string or as an object."""
        token = self._config.get(name)
        text = token.get("content") if isinstance(token, Mapping) else token
        return text if isinstance(text, str) and text else None

    def _add_tokens(self) -> None:
        """Brings the tokens that only tokenizer_config.json declares into tokenizer.json."""
        added: dict[int, dict[str, Any]] = {
            token["id"]: token for token in self._tokenizer.get("added_tokens") or ()
        }
        for token_id, token in (self._config.get("added_tokens_decoder") or {}).items():
            added[int(token_id)] = added_token(int(token_id), **token)
        by_text = {token["content"]: token for token in added.values()}
        for text in self._special_texts():
            token_id = self._model_vocab_id(text)
            if text in by_text:
                by_text[text]["special"] = True
            elif token_id is not None:
                added[token_id] = added_token(token_id, content=text)
        self._tokenizer["added_tokens"] = [added[token_id] for token_id in sorted(added)]

    def _special_texts(self) -> list[str]:
        named = ("bos_token", "eos_token", "unk_token", "pad_token")
        texts = [self._named(name) for name in named]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            extra = self._config.get(key) or ()
            values = extra.values() if isinstance(extra, Mapping) else extra
            texts += [token["content"] if isinstance(token, Mapping) else token for token in values]
        return [text for text in texts if text]

    def _model_vocab_id(self, text: str) -> int | None:
        vocab = self._tokenizer["model"].get("vocab")
        if isinstance(vocab, Mapping):
            return vocab.get(text)
        return next((i for i, (piece, _) in enumerate(vocab or ()) if piece == text), None)

    def _token_id(self, text: str) -> int | None:
        for token in self._tokenizer["added_tokens"]:
            if token["content"] == text:
                return int(token["id"])
        return self._model_vocab_id(text)

    def _settle_post_processor(self, bos: str | None, eos: str | None) -> tuple[bool, bool]:
        """Makes the post-processor say what tokenizer_config.json says, where it says anything."""
        before, after = _surroundings(self._tokenizer.get("post_processor"))
        wanted = (
            _flag(self._config.get("add_bos_token"), default=before) and bos is not None,
            _flag(self._config.get("add_eos_token"), default=after) and eos is not None,
        )
        if wanted != (before, after):
            self._tokenizer["post_processor"] = template_post_processor(
                self._with_id(bos) if wanted[0] else None,
                self._with_id(eos) if wanted[1] else None,
            )
        return wanted

    def _with_id(self, text: str | None) -> tuple[str, int]:
        token_id = None if text is None else self._token_id(text)
        if text is None or token_id is None:
            raise ModelError(f"the tokenizer does not know its special token {text!r}")
        return text, token_id

    def _eos_token_ids(self, eos: str | None) -> tuple[int, ...]:
        found: list[int | None] = [self._token_id(eos)] if eos else []
        for name in ("generation_config.json", "config.json"):
            listed = (self._json(name) or {}).get("eos_token_id")
            found += listed if isinstance(listed, list) else [listed]
        return tuple(dict.fromkeys(i for i in found if i is not None))

    def _chat_template(self) -> str | None:
        file = self._path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        for template in (
            self._config.get("chat_template"),
            (self._json("chat_template.json") or {}).get("chat_template"),
        ):
            if isinstance(template, str):
                return template
            if isinstance(template, Sequence) and template:
                named = {entry["name"]: entry["template"] for entry in template}
                return str(named.get("default") or next(iter(named.values())))
        return None


def added_token(token_id: int, *, content: str, **flags: Any) -> dict[str, Any]:
    """An entry of tokenizer.json's `added_tokens`; special unless `flags` say otherwise."""
    names = ("single_word", "lstrip", "rstrip", "normalized")
    return {
        "id": token_id,
        "content": content,
        **{name: bool(flags.get(name, False)) for name in names},
        "special": bool(flags.get("special", True)),
    }


def _flag(value: object, *, default: bool) -> bool:
    return default if value is None else bool(value)


def _surroundings(post_processor: Mapping[str, Any] | None) -> tuple[bool, bool]:
    """Whether a post-processor adds a token before and after a text."""
    if post_processor is None:
        return False, False
    kind = post_processor["type"]
    if kind == "Sequence":
        each = [_surroundings(part) for part in post_processor["processors"]]
        return any(before for before, _ in each), any(after for _, after in each)
    if kind == "TemplateProcessing":
        single = post_processor["single"]
        return "SpecialToken" in single[0], "SpecialToken" in single[-1]
    return (True, True) if kind in ("BertProcessing", "RobertaProcessing") else (False, False)
