"""What serve says when it is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.banner import banner, exposed_warning, is_loopback, url_of
from headrace.config_loading import LoadedSettings, load_settings
from headrace.engine.wire import ModelInfo

INFO = ModelInfo(
    architecture="llama",
    parameters=134_515_008,
    context_length=8192,
    vocab_size=49152,
    eos_token_ids=[2],
    bos_token=None,
    eos_token=None,
    tokenizer=b"",
    chat_template=None,
    dtype="fp32",
    device="cpu",
    weight_bytes=538_000_000,
    revision="r",
    block_size=16,
    num_blocks=1000,
    kv_bytes=3 << 30,
    max_running=48,
    max_step_tokens=128,
)


def loaded(tmp_path: Path, **env: str) -> LoadedSettings:
    return load_settings(environ={"HOME": str(tmp_path), **env}, cwd=tmp_path)


def test_it_says_what_an_operator_looks_for_in_twelve_lines(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("[limits]\nmax_queue = 7\n")
    settings = loaded(tmp_path, HEADRACE__SERVER__API_KEYS="secret-one,secret-two")
    text = banner(settings, INFO, "tiny", "http://127.0.0.1:8000")
    assert len(text.splitlines()) <= 12
    for words in (
        "serves tiny",
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8000/docs",
        "llama, 135 M parameters, context 8,192 tokens",
        "cpu, fp32",
        "16,000 tokens in 3.0 GiB",
        "48 running, 7 waiting, 128 tokens a step",
        "2 API keys",
        f"1 from the environment, 1 from {tmp_path / 'headrace.toml'}, the rest defaults",
    ):
        assert words in text
    assert "secret" not in text


def test_a_remote_model_has_no_memory_to_tell_of(tmp_path: Path) -> None:
    text = banner(loaded(tmp_path), None, "far", "http://127.0.0.1:1")
    assert "KV cache" not in text
    assert "open, no API key" in text
    assert "all defaults" in text


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("example.org", "http://example.org:80"),
    ],
)
def test_the_url_is_one_that_a_client_can_use(host: str, url: str) -> None:
    assert url_of(host, 80) == url


@pytest.mark.parametrize(
    ("host", "key", "warns"),
    [
        ("127.0.0.1", "", False),
        ("127.8.8.8", "", False),
        ("localhost", "", False),
        ("::1", "", False),
        ("0.0.0.0", "k", False),
        ("0.0.0.0", "", True),
        ("::", "", True),
        ("192.0.2.1", "", True),
        ("127.example.org", "", True),
    ],
)
def test_an_open_server_on_a_network_warns(
    tmp_path: Path, host: str, key: str, warns: bool
) -> None:
    env = {"HEADRACE__SERVER__HOST": host, "HEADRACE__SERVER__API_KEYS": key or "[]"}
    warning = exposed_warning(loaded(tmp_path, **env))
    assert (warning is not None) is warns
    assert warning is None or "HEADRACE__SERVER__API_KEYS" in warning
    assert is_loopback(host) is (not warns and not key)
