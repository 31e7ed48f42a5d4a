"""Reads settings: flags > environment > TOML file > defaults, each value knowing its origin."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from headrace.config import Settings

__all__ = [
    "ENV_PREFIX",
    "ConfigError",
    "Given",
    "LoadedSettings",
    "env_name",
    "load_settings",
    "setting_fields",
    "user_config_file",
]

ENV_PREFIX = "HEADRACE__"
FILE_NAME = "headrace.toml"
MASK = "********"


class ConfigError(Exception):
    """Settings that cannot be used; `problems` has a sentence for each, with key and origin."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Given:
    """A value as one source gives it. Text from a flag or the environment is parsed by its key."""

    value: Any
    origin: str
    is_text: bool = False
    folder: Path | None = None
    """What a relative path in a file is relative to."""


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings with, for every key, where its value came from."""

    settings: Settings
    origins: Mapping[str, str]
    file: Path | None

    def origin(self, key: str) -> str:
        """Such as `default`, `file ./headrace.toml`, `environment HEADRACE__…`, `flag --port`."""
        return self.origins[key]

    def rows(self) -> list[tuple[str, str, str]]:
        """Every key with its value, secrets masked, and its origin."""
        return [
            (key, _shown(_value_at(self.settings, key)), self.origins[key])
            for key in setting_fields()
        ]


def setting_fields(model: type[BaseModel] = Settings, prefix: str = "") -> dict[str, FieldInfo]:
    """Every settable key such as `server.cors.origins`, in order of declaration."""
    found: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= setting_fields(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = info
    return found


def env_name(key: str) -> str:
    """The environment variable that sets `key`."""
    return ENV_PREFIX + key.replace(".", "__").upper()


def user_config_file(environ: Mapping[str, str]) -> Path:
    """The settings file of this user, read where the working folder has none."""
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config"
    return Path(base) / "headrace" / FILE_NAME


def load_settings(
    *,
    flags: Mapping[str, Given] | None = None,
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> LoadedSettings:
    """Merges all sources, or raises ConfigError naming everything that is wrong with them."""
    environ = os.environ if environ is None else environ
    fields = setting_fields()
    problems: list[str] = []
    file = _find_file(config_file, environ, Path.cwd() if cwd is None else cwd)
    given: dict[str, Given] = {}
    if file is not None:
        given |= _from_file(file, fields, problems)
    given |= _from_environment(environ, fields, problems)
    given |= _known_flags(flags or {}, fields, problems)

    tree: dict[str, Any] = {}
    for key, item in given.items():
        try:
            _plant(tree, key, _prepared(fields[key], item))
        except ValueError as error:
            problems.append(f"{key} ({item.origin}): {error}")
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        problems += _refusals(error, given)
    else:
        if not problems:
            origins = {key: given[key].origin if key in given else "default" for key in fields}
            return LoadedSettings(settings, origins, file)
    raise ConfigError(problems)


def _find_file(chosen: Path | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    if chosen is not None:
        chosen = chosen.expanduser()
        if not chosen.is_file():
            raise ConfigError([f"the configuration file {chosen} does not exist"])
        return chosen
    for candidate in (cwd / FILE_NAME, user_config_file(environ)):
        if candidate.is_file():
            return candidate
    return None


def _from_file(
    path: Path, fields: Mapping[str, FieldInfo], problems: list[str]
) -> dict[str, Given]:
    origin = f"file {path}"
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError([f"cannot read the configuration {origin}: {error.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"the configuration {origin} is not valid TOML: {error}"]) from None
    sections = {key.rpartition(".")[0] for key in fields} | {
        key.partition(".")[0] for key in fields
    }
    given: dict[str, Given] = {}
    for key, value in _leaves(document, sections):
        if key in fields:
            given[key] = Given(value, origin, folder=path.parent)
        elif key in sections:
            problems.append(f"{key} ({origin}): is a section; write [{key}] and its keys below")
        else:
            problems.append(f"{key} ({origin}): unknown key{_did_you_mean(key, list(fields))}")
    return given


def _leaves(
    table: Mapping[str, Any], sections: set[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and (key in sections or value):
            yield from _leaves(value, sections, f"{key}.")
        else:
            yield key, value


def _from_environment(
    environ: Mapping[str, str], fields: Mapping[str, FieldInfo], problems: list[str]
) -> dict[str, Given]:
    names = {env_name(key): key for key in fields}
    given: dict[str, Given] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        if name in names:
            given[names[name]] = Given(text, f"environment {name}", is_text=True)
        else:
            hint = _did_you_mean(name, list(names))
            problems.append(f"environment {name}: unknown variable{hint}")
    return given


def _known_flags(
    flags: Mapping[str, Given], fields: Mapping[str, FieldInfo], problems: list[str]
) -> dict[str, Given]:
    for key, item in flags.items():
        if key not in fields:
            hint = _did_you_mean(key, list(fields))
            problems.append(f"{key} ({item.origin}): unknown key{hint}")
    return {key: item for key, item in flags.items() if key in fields}


def _did_you_mean(word: str, known: list[str]) -> str:
    same_leaf = [key for key in known if key.rpartition(".")[2] == word.rpartition(".")[2]]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    best = close or same_leaf
    return f"; did you mean {best[0]}?" if best else ""


def _prepared(field: FieldInfo, item: Given) -> Any:
    """The value in a shape that pydantic can check; ValueError where it has none."""
    kinds = get_args(field.annotation) or (field.annotation,)
    value = item.value
    if item.is_text and isinstance(value, str):
        value = _from_text(value, is_list=get_origin(field.annotation) is tuple, kinds=kinds)
    if isinstance(value, bool) and bool not in kinds:
        raise ValueError("is true or false where another kind of value is expected")
    if Path in kinds and isinstance(value, str):
        path = Path(value).expanduser()
        return item.folder / path if item.folder is not None else path
    return value


def _from_text(text: str, *, is_list: bool, kinds: tuple[Any, ...]) -> Any:
    if not text.strip():
        raise ValueError("is set but empty; give it a value or unset it")
    if not is_list:
        return None if type(None) in kinds and text.lower() in {"none", "null"} else text
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",")]
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # its message would quote the value
        raise ValueError("starts like a JSON list but is not one") from None


def _plant(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[leaf] = value


def _refusals(error: ValidationError, given: Mapping[str, Given]) -> list[str]:
    """One sentence for each refused key; the value itself is never in it."""
    sentences = []
    for detail in error.errors(include_input=False, include_url=False, include_context=False):
        path = [str(part) for part in detail["loc"]]
        message = detail["msg"].removeprefix("Value error, ")
        if not path:  # of settings that do not go together; the message names them
            sentences.append(message)
            continue
        keys = [".".join(path[:end]) for end in range(len(path), 0, -1)]
        key = next((key for key in keys if key in given), ".".join(path))
        origins = sorted(
            {
                item.origin
                for name, item in given.items()
                if name == key or name.startswith(key + ".")
            }
        )
        shown = ".".join(path) if key == "tenants" else key
        sentences.append(f"{shown} ({', '.join(origins)}): {message[:1].lower()}{message[1:]}")
    return list(dict.fromkeys(sentences))


def _value_at(settings: Settings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _shown(value: Any) -> str:
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, tuple):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)
