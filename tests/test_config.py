"""Settings: precedence, origins, refusals, secrets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config import CorsSettings, EngineSettings, Settings, format_size
from headrace.config_loading import (
    ConfigError,
    Given,
    LoadedSettings,
    env_name,
    load_settings,
    setting_fields,
)

SECRET = "sk-do-not-show-me"


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Loads with a working folder and home of its own, so that the machine's files do not count."""

    def loading(
        toml: str | None = None,
        env: Mapping[str, str] | None = None,
        flags: Mapping[str, Given] | None = None,
        **more: Any,
    ) -> LoadedSettings:
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        if toml is not None:
            (work / "headrace.toml").write_text(toml)
        environ = {"HOME": str(tmp_path / "home"), **(env or {})}
        return load_settings(flags=flags, environ=environ, cwd=work, **more)

    return loading


def problems(load: Any, *args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    return caught.value.problems


def test_defaults_are_settings_and_say_so(load: Any) -> None:
    loaded = load()
    assert loaded.settings == Settings()
    assert set(loaded.origins) == set(setting_fields())
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.file is None


def test_each_source_outranks_the_next(load: Any) -> None:
    toml = "[server]\nport = 1\nhost = '0.0.0.0'\nidle_timeout = 90\n"
    env = {"HEADRACE__SERVER__PORT": "2", "HEADRACE__SERVER__HOST": "::1"}
    loaded = load(toml, env, {"server.port": Given(3, "flag --port")})
    server = loaded.settings.server
    assert (server.port, server.host, server.idle_timeout) == (3, "::1", 90.0)
    assert loaded.origin("server.port") == "flag --port"
    assert loaded.origin("server.host") == "environment HEADRACE__SERVER__HOST"
    assert loaded.origin("server.idle_timeout") == f"file {loaded.file}"
    assert loaded.origin("engine.model") == "default"


@pytest.mark.parametrize("key", setting_fields())
def test_every_key_is_reachable_from_file_environment_and_flag(load: Any, key: str) -> None:
    samples = {"api_keys": "k1", "origins": "https://a.example", "chat_template": "t.jinja"}
    samples |= {"models": "wordllama", "secret": "0123456789abcdef", "url": "redis://r"}
    samples["tenants"] = "t" if "." in key else '[{"name": "a"}]'
    secret = {env_name("caching.secret"): samples["secret"]} if key == "caching.redis.url" else {}
    leaf = key.rpartition(".")[2]
    default = setting_fields()[key].default
    text = samples.get(leaf, "7" if default is None else str(default).lower())
    assert load(env={**secret, env_name(key): text}).origin(key) == f"environment {env_name(key)}"
    flags = {key: Given(text, "flag --set", is_text=True)}
    assert load(env=secret, flags=flags).origin(key) == "flag --set"
    listed = leaf in {"api_keys", "origins", "models"} or key.endswith(".tenants")
    quoted = f"['{text}']" if listed else f"'{text}'"
    section = key.rpartition(".")[0]
    written = f"[{section}]\n{leaf} = {quoted}\n" if section else "[[tenants]]\nname = 'a'\n"
    if not isinstance(default, bool):
        assert load(written, secret).origin(key).startswith("file ")


def test_file_is_the_chosen_one_else_the_folders_else_the_users(load: Any, tmp_path: Path) -> None:
    users = tmp_path / "home" / ".config" / "headrace" / "headrace.toml"
    users.parent.mkdir(parents=True)
    users.write_text("server.port = 1\n")
    assert load().settings.server.port == 1
    elsewhere = tmp_path / "xdg" / "headrace" / "headrace.toml"
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_text("server.port = 2\n")
    assert load(env={"XDG_CONFIG_HOME": str(tmp_path / "xdg")}).settings.server.port == 2
    assert load("server.port = 3\n").settings.server.port == 3
    chosen = tmp_path / "chosen.toml"
    chosen.write_text("server.port = 4\n")
    assert load(config_file=chosen).settings.server.port == 4


def test_a_chosen_file_must_exist_and_be_toml(load: Any, tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert problems(load, config_file=missing) == [
        f"the configuration file {missing} does not exist"
    ]
    assert "is not valid TOML" in problems(load, "server = {")[0]
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    assert "is not valid TOML" in problems(load, config_file=tmp_path / "latin.toml")[0]


@pytest.mark.parametrize(
    ("toml", "key", "hint"),
    [
        ("[server]\nprot = 1", "server.prot", "server.port"),
        ("port = 1", "port", "server.port"),
        ("[sever]\nport = 1", "sever.port", "server.port"),
        ("[server.cors]\norigin = ['*']", "server.cors.origin", "server.cors.origins"),
        ("[engine]\ncors.origins = []", "engine.cors.origins", "server.cors.origins"),
    ],
)
def test_unknown_keys_in_a_file_are_refused_with_a_hint(
    load: Any, toml: str, key: str, hint: str
) -> None:
    (problem,) = problems(load, toml)
    assert problem.startswith(f"{key} (file ")
    assert problem.endswith(f"unknown key; did you mean {hint}?")


def test_unknown_words_without_a_likeness_get_no_hint(load: Any) -> None:
    assert problems(load, "zzzz = 1")[0].endswith("unknown key")
    assert problems(load, "[zzzz]\n")[0].endswith("unknown key")


def test_a_section_given_a_value_is_refused(load: Any) -> None:
    assert "server (file" in problems(load, "server = 8000")[0]
    assert problems(load, "server = 8000")[0].endswith("write [server] and its keys below")


def test_unknown_variables_are_refused_with_a_hint_and_others_ignored(load: Any) -> None:
    assert problems(load, env={"HEADRACE__SERVER__PROT": "1"}) == [
        "environment HEADRACE__SERVER__PROT: unknown variable; did you mean HEADRACE__SERVER__PORT?"
    ]
    assert load(env={"HEADRACE_CACHE": "/x", "PORT": "1"}).settings == Settings()


def test_unknown_flags_are_refused_with_a_hint(load: Any) -> None:
    (problem,) = problems(load, flags={"limits.max_queu": Given("1", "flag --set", is_text=True)})
    assert problem == "limits.max_queu (flag --set): unknown key; did you mean limits.max_queue?"


def test_all_problems_are_told_at_once(load: Any) -> None:
    env = {"HEADRACE__SERVER__PORT": "99999", "HEADRACE__ENGINE__DTYPE": "fp8"}
    found = problems(load, "[limits]\nmax_queue = -1\n[x]\ny = 1\n", env)
    assert [problem.split(" (")[0] for problem in sorted(found)] == [
        "engine.dtype",
        "limits.max_queue",
        "server.port",
        "x.y",
    ]
    assert "environment HEADRACE__SERVER__PORT" in str(found)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("server.port", ""),
        ("server.port", " "),
        ("server.port", "-1"),
        ("server.port", "http"),
        ("server.host", ""),
        ("server.api_keys", ""),
        ("server.api_keys", "a,,b"),
        ("server.api_keys", '["a"'),
        ("server.api_keys", '[1, {"a": 2}]'),
        ("server.idle_timeout", "0"),
        ("server.idle_timeout", "inf"),
        ("server.drain_timeout", "nan"),
        ("server.max_body_bytes", "0"),
        ("server.max_body_bytes", "8 MiBs"),
        ("server.metrics_need_key", "maybe"),
        ("engine.kv_memory", "iB"),
        ("engine.kv_memory", "-2GiB"),
        ("engine.threads", "true"),
        ("engine.device", "tpu"),
        ("engine.served_name", ""),
    ],
)
def test_bad_text_is_refused_naming_key_and_origin(load: Any, key: str, text: str) -> None:
    found = problems(load, env={env_name(key): text})
    assert found
    for problem in found:
        assert problem.startswith(key)
        assert f"(environment {env_name(key)})" in problem


@pytest.mark.parametrize(
    "toml",
    [
        "[engine]\nthreads = true",
        "[server]\nport = false",
        "[server]\nport = 80.5",
        "[server]\nidle_timeout = inf",
        "[server]\napi_keys = 'one'",
        "[server]\nhost = 1979-05-27",
        "[engine]\nmodel = ['a']",
    ],
)
def test_values_of_another_kind_are_refused(load: Any, toml: str) -> None:
    (problem,) = problems(load, toml)
    assert "(file " in problem


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1048576),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("512MB", 512_000_000),
        ("8m", 8_000_000),
        ("64KiB", 65536),
        ("10B", 10),
    ],
)
def test_sizes_have_units(load: Any, text: str, size: int) -> None:
    assert load(env={"HEADRACE__ENGINE__KV_MEMORY": text}).settings.engine.kv_memory == size
    assert load(f"[server]\nmax_body_bytes = '{text}'").settings.server.max_body_bytes == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (98 << 20, "98.0 MiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_sizes_are_shown_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize("text", ["k1,k2", " k1 , k2 ", '["k1", "k2"]'])
def test_lists_are_comma_separated_or_json(load: Any, text: str) -> None:
    keys = load(env={"HEADRACE__SERVER__API_KEYS": text}).settings.server.api_keys
    assert [key.get_secret_value() for key in keys] == ["k1", "k2"]


def test_an_empty_list_and_a_none_can_be_said(load: Any) -> None:
    toml = "[server]\napi_keys = ['k']\n[engine]\nthreads = 2\n"
    env = {"HEADRACE__SERVER__API_KEYS": "[]", "HEADRACE__ENGINE__THREADS": "none"}
    settings = load(toml, env).settings
    assert settings.server.api_keys == ()
    assert settings.engine.threads is None


def test_a_path_in_a_file_is_relative_to_the_file(load: Any, tmp_path: Path) -> None:
    loaded = load("[engine]\nchat_template = 'chat.jinja'\n")
    assert loaded.settings.engine.chat_template == tmp_path / "work" / "chat.jinja"
    env = {"HEADRACE__ENGINE__CHAT_TEMPLATE": "chat.jinja"}
    assert load(env=env).settings.engine.chat_template == Path("chat.jinja")


def test_secrets_are_never_shown(load: Any) -> None:
    loaded = load(f"[server]\napi_keys = ['{SECRET}', 'k2']\n")
    assert SECRET not in repr(loaded)
    assert SECRET not in str(loaded.rows())
    shown = {key: value for key, value, _ in loaded.rows()}
    assert shown["server.api_keys"] == "[********, ********]"


@pytest.mark.parametrize(
    ("toml", "env"),
    [
        (f"[server]\napi_keys = ['{SECRET} ']", {}),
        (f"[server]\napi_keys = '{SECRET}'", {}),
        (f"[server]\napi_key = ['{SECRET}']", {}),
        (None, {"HEADRACE__SERVER__API_KEYS": f'["{SECRET}"'}),
        (None, {"HEADRACE__SERVER__API_KEYS": f"{SECRET}é"}),
        (f"[server]\napi_keys = ['{SECRET}'\n", {}),
    ],
)
def test_a_refusal_never_repeats_a_secret(load: Any, toml: str | None, env: dict[str, str]) -> None:
    assert SECRET not in "\n".join(problems(load, toml, env))


def test_credentials_need_named_origins(load: Any) -> None:
    (problem,) = problems(load, env={"HEADRACE__SERVER__CORS__CREDENTIALS": "true"})
    assert problem.startswith("server.cors (environment HEADRACE__SERVER__CORS__CREDENTIALS): ")
    assert CorsSettings(origins=("https://a.example",), credentials=True).credentials


def test_settings_do_not_change_after_loading() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        EngineSettings().threads = 2


def test_tenants_are_tables_of_their_own(load: Any) -> None:
    text = """
[[tenants]]
name = "chat"
weight = 3
api_keys = ["sk-chat"]
requests_per_minute = 60
models = ["m"]

[[tenants]]
name = "nightly"
default_class = "batch"
highest_class = "standard"
"""
    loaded = load(text)
    chat, nightly = loaded.settings.tenants
    assert (chat.name, chat.weight, chat.requests_per_minute) == ("chat", 3.0, 60.0)
    assert (nightly.default_class, nightly.highest_class) == ("batch", "standard")
    assert "sk-chat" not in str(loaded.rows())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 'a b'", "tenants.0.name"),
        ("name = 'a'\nweight = 0", "tenants.0.weight"),
        ("name = 'a'\nwieght = 1", "tenants.0.wieght"),
        ("name = 'a'\ndefault_class = 'urgent'", "tenants.0.default_class"),
        ("name = 'a'\ndefault_class = 'system'", "must not be less urgent"),
        ("name = 'a'\n[[tenants]]\nname = 'a'", "two named a"),
        ("name = 'a/b'", "tenants.0.name"),
        ("name = 'a'\napi_keys = ['k', 'k']", "listed twice"),
        ("name = 'key-1'\n[server]\napi_keys = ['k']", "server.api_keys calls"),
        ("name = 'a'\napi_keys = ['k']\n[server]\napi_keys = ['k']", "belongs to two"),
    ],
)
def test_tenants_that_contradict_themselves_are_refused(load: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(f"[[tenants]]\n{text}\n")
    assert words in str(refusal.value)
    assert "'k'" not in str(refusal.value)
