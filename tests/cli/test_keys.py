"""headrace keys, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app

RUNNER = CliRunner()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return None


@pytest.mark.usefixtures("run")
def test_made_listed_and_revoked(tmp_path: Path) -> None:
    made = RUNNER.invoke(app, ["keys", "create", "laptop", "--tenant", "chat"])
    assert made.exit_code == 0
    key = made.stdout.strip()
    assert key.startswith("hr-")
    assert (tmp_path / "headrace" / "keys.sqlite").exists()
    listed = RUNNER.invoke(app, ["keys", "list"])
    assert "laptop" in listed.stdout
    assert f"...{key[-4:]}" in listed.stdout
    assert key not in listed.stdout
    assert RUNNER.invoke(app, ["keys", "revoke", "laptop"]).exit_code == 0
    (row,) = json.loads(RUNNER.invoke(app, ["keys", "list", "--json"]).stdout)
    assert row["tenant"] == "chat"
    assert row["revoked"] is not None


@pytest.mark.usefixtures("run")
def test_a_key_joins_a_tenant_of_the_settings_only_when_told(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text(
        "[server]\napi_keys = ['k']\n[[tenants]]\nname = 'ops'\nadmin = true\n"
    )
    for name in ("ops", "key-1", "default"):
        refusal = RUNNER.invoke(app, ["keys", "create", name])
        assert refusal.exit_code == 2
        assert f"--tenant {name}" in refusal.stderr
    for words, note in (
        (["ops", "--tenant", "ops"], ""),
        (["laptop"], ""),
        (["phone", "--tenant", "osp"], "no tenant named osp"),
    ):
        made = RUNNER.invoke(app, ["keys", "create", *words])
        assert made.exit_code == 0
        assert note in made.stderr
        assert bool(made.stderr) is bool(note)
        assert made.stdout.startswith("hr-")
        assert len(made.stdout.split()) == 1, "nothing but the key, for scripts"


@pytest.mark.usefixtures("run")
def test_a_key_is_revoked_while_the_settings_are_wrong(tmp_path: Path) -> None:
    store = ["--store", str(tmp_path / "k.sqlite")]
    assert RUNNER.invoke(app, ["keys", "create", "a", *store]).exit_code == 0
    (tmp_path / "headrace.toml").write_text("[server]\nprot = 1\n")
    assert RUNNER.invoke(app, ["keys", "revoke", "a"]).exit_code == 2
    assert RUNNER.invoke(app, ["keys", "revoke", "a", *store]).exit_code == 0


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["revoke", "nobody"], 1, "no key named nobody"),
        (["create", " "], 2, "printable"),
        (["create", "x" * 65], 2, "printable"),
        (["create", "my laptop"], 1, "name its tenant"),
        (["create", "a", "--tenant", "b/c"], 1, "a tenant is named by"),
        (["list", "--config", "missing.toml"], 2, "does not exist"),
    ],
)
def test_faults_are_told_in_a_sentence(words: list[str], code: int, said: str) -> None:
    result = RUNNER.invoke(app, ["keys", *words])
    assert result.exit_code == code
    assert said in result.stderr
    assert "Traceback" not in result.output
