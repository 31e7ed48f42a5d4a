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
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["revoke", "nobody"], 1, "no key named nobody"),
        (["create", " "], 2, "printable"),
        (["create", "x" * 65], 2, "printable"),
        (["list", "--config", "missing.toml"], 2, "does not exist"),
    ],
)
def test_faults_are_told_in_a_sentence(words: list[str], code: int, said: str) -> None:
    result = RUNNER.invoke(app, ["keys", *words])
    assert result.exit_code == code
    assert said in result.stderr
    assert "Traceback" not in result.output
