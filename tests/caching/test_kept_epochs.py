"""Invalidation over a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.caching import Epochs, Scope
from headrace.caching.kept_epochs import keep_epochs


def kept(path: Path) -> Epochs:
    epochs = Epochs()
    keep_epochs(epochs, path)
    return epochs


def test_what_was_invalidated_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "state" / "epochs.json"
    first = kept(path)
    assert first.of("a", "m", "") == (0, 0, 0, 0, 0)
    first.bump(Scope(tenant="a"))
    first.bump(Scope(tenant="a", tag="x"))
    first.learn(Scope(model="m").name, 7)
    second = kept(path)
    assert second.of("a", "m", "") == first.of("a", "m", "")
    assert second.of_tag("a", "x") == 1
    assert path.stat().st_mode & 0o077 == 0
    assert [file.name for file in path.parent.iterdir()] == ["epochs.json"]


@pytest.mark.parametrize("broken", [b"", b"[]", b'{"a": "b"}', b"\xff"])
def test_a_file_that_is_broken_is_told_of_and_replaced(
    tmp_path: Path, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "epochs.json"
    path.write_bytes(broken)
    epochs = kept(path)
    assert "cannot be read" in caplog.text
    epochs.bump(Scope())
    assert kept(path).of("a", "m", "")[0] == 1


def test_without_a_place_to_write_it_says_so_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    epochs = kept(tmp_path / "file" / "epochs.json")
    epochs.bump(Scope())
    assert epochs.of("a", "m", "")[0] == 1
    assert "cannot be written" in caplog.text
