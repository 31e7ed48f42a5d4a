"""What was learnt, over a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.caching.semantic.journal import Journal
from headrace.core.clock import VirtualClock

pytestmark = pytest.mark.anyio

PART = b"p" * 32


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


async def read(journal: Journal) -> list[tuple[bytes, str, bytes, float]]:
    return [row async for page in journal.questions() for row in page]


async def test_what_was_learnt_is_there_after_a_restart(tmp_path: Path) -> None:
    clock = VirtualClock()
    until = clock.wall() + 100.0
    first = Journal(tmp_path / "state" / "questions.sqlite", clock, most=10)
    first.learned(PART, "what is it?", key(1), until)
    first.learned(PART, "gone?", key(2), until)
    first.forgotten(key(2))
    first.wrong(b"w" * 32)
    await first.close()
    second = Journal(tmp_path / "state" / "questions.sqlite", clock, most=10)
    assert await read(second) == [(PART, "what is it?", key(1), until)]
    assert await second.wrongs() == [b"w" * 32]
    await second.close()
    await second.close()
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
    assert (tmp_path / "state" / "questions.sqlite").stat().st_mode & 0o077 == 0


async def test_the_expired_and_the_oldest_of_too_many_are_not_kept(tmp_path: Path) -> None:
    clock = VirtualClock()
    now = clock.wall()
    journal = Journal(tmp_path / "q.sqlite", clock, most=3)
    for n in range(6):
        journal.learned(PART, f"{n}?", key(n), now + (1.0 if n == 4 else 100.0))
    await journal.close()
    clock.advance(2.0)
    again = Journal(tmp_path / "q.sqlite", clock, most=3)
    assert [text for _, text, _, _ in await read(again)] == ["2?", "3?", "5?"]
    await again.close()


async def test_many_are_read_in_pages(tmp_path: Path) -> None:
    clock = VirtualClock()
    journal = Journal(tmp_path / "q.sqlite", clock, most=1000)
    for n in range(600):
        journal.learned(PART, f"{n}?", key(n), clock.wall() + 100.0)
    await journal.close()
    again = Journal(tmp_path / "q.sqlite", clock, most=1000)
    assert [text for _, text, _, _ in await read(again)] == [f"{n}?" for n in range(600)]
    await again.close()


async def test_a_file_that_is_no_journal_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 40)
    journal = Journal(path, VirtualClock(), most=10)
    assert await read(journal) == []
    journal.wrong(b"w" * 32)
    await journal.close()
    assert path.with_name("q.sqlite.broken").exists()
    again = Journal(path, VirtualClock(), most=10)
    assert await again.wrongs() == [b"w" * 32]
    await again.close()


async def test_without_a_place_to_write_it_forgets_and_nothing_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    journal = Journal(tmp_path / "file" / "q.sqlite", VirtualClock(), most=10)
    journal.learned(PART, "x?", key(1), 1e12)
    assert await read(journal) == []
    assert await journal.wrongs() == []
    await journal.close()
