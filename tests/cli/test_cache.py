"""headrace cache, as a person types it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.app import app

ENTRY = "ab" * 32


class Server(BaseHTTPRequestHandler):
    """Answers from `answers`, and keeps what it was asked."""

    answers: ClassVar[dict[str, tuple[int, bytes, dict[str, str]]]] = {}
    asked: ClassVar[list[tuple[str, str, bytes, dict[str, str]]]] = []

    def _answer(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        lowered = {name.lower(): value for name, value in self.headers.items()}
        self.asked.append((self.command, self.path, data, lowered))
        status, body, headers = self.answers.get(self.path, (200, b"{}", {}))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - as http.server has it

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Server.answers, Server.asked = {}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(url: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["cache", *words, "--url", url])


def test_stats_are_printed_and_the_key_is_sent(url: str) -> None:
    Server.answers["/v1/cache/stats"] = (200, b'{"hits": {"memory": 3}}', {})
    done = run(url, "stats", "--api-key", "sk-1")
    assert json.loads(done.stdout) == {"hits": {"memory": 3}}
    assert Server.asked[0][3]["authorization"] == "Bearer sk-1"


def test_entries_are_shown_and_forgotten(url: str) -> None:
    assert run(url, "show", ENTRY).exit_code == 0
    assert run(url, "forget", ENTRY).stdout == "forgotten\n"
    assert [row[:2] for row in Server.asked] == [
        ("GET", f"/v1/cache/entries/{ENTRY}"),
        ("DELETE", f"/v1/cache/entries/{ENTRY}"),
    ]


def test_invalidation_says_what_it_means(url: str) -> None:
    assert run(url, "invalidate").exit_code == 2
    assert run(url, "invalidate", "--all", "--tenant", "a").exit_code == 2
    assert Server.asked == []
    done = run(url, "invalidate", "--tenant", "a", "--tag", "t")
    assert done.stdout == "invalidated tenant a, tag t\n"
    assert run(url, "invalidate", "--all").stdout == "invalidated everything\n"
    assert [json.loads(row[2]) for row in Server.asked] == [{"tenant": "a", "tag": "t"}, {}]


def test_what_is_exported_is_imported(url: str, tmp_path: Path) -> None:
    lines = b"".join(b'{"key": "%d", "entry": "%s"}\n' % (n, b"x" * 300_000) for n in range(5))
    Server.answers["/v1/cache/export"] = (200, lines, {})
    Server.answers["/v1/cache/import"] = (200, b'{"taken": 2, "skipped": 1}', {})
    file = tmp_path / "answers.jsonl"
    done = run(url, "export", "--out", str(file))
    assert done.exit_code == 0
    assert file.read_bytes() == lines
    assert "5 entries" in done.stderr
    done = run(url, "import", str(file))
    sent = [row[2] for row in Server.asked if row[1] == "/v1/cache/import"]
    assert b"".join(sent) == lines
    assert len(sent) == 2
    assert done.stdout == "4 taken, 2 skipped\n"


def test_requests_of_a_file_are_asked_once(url: str, tmp_path: Path) -> None:
    Server.answers["/v1/chat/completions"] = (200, b"{}", {"x-cache": "MISS"})
    Server.answers["/v1/completions"] = (
        200,
        b"{}",
        {"x-cache": "BYPASS", "x-cache-reason": "sampled"},
    )
    file = tmp_path / "requests.jsonl"
    chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "é"}]}
    lines = [chat, {"custom_id": "1", "body": {**chat, "stream": True}}, {"prompt": "x"}]
    file.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = run(url, "warm", str(file), "--concurrency", "3")
    assert done.exit_code == 0, done.output
    assert [line.split(None, 1) for line in done.stdout.splitlines()] == [
        ["2", "computed and stored"],
        ["1", "computed but not stored (sampled)"],
    ]
    assert all(row[3]["x-priority"] == "batch" for row in Server.asked)
    assert all(json.loads(row[2])["stream"] is False for row in Server.asked)


@pytest.mark.parametrize("line", ["{", "[]", '{"input": "x"}'])
def test_a_line_that_is_no_request_is_named_before_any_is_asked(
    url: str, tmp_path: Path, line: str
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "x"}\n' + line)
    done = run(url, "warm", str(file))
    assert done.exit_code == 1
    assert "line 2" in done.stderr
    assert Server.asked == []


def test_refusals_are_a_sentence(url: str) -> None:
    body = b'{"error": {"message": "This needs the key of an admin."}}'
    Server.answers["/v1/cache/stats"] = (403, body, {})
    done = run(url, "stats")
    assert done.exit_code == 1
    assert done.stderr == "headrace: 403: This needs the key of an admin.\n"
    Server.answers["/v1/cache/stats"] = (502, b"<html>", {})
    assert run(url, "stats").stderr == "headrace: 502 Bad Gateway\n"


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:1", "ftp://x", "http://", "http://x:port"])
def test_a_server_that_cannot_be_reached(wrong: str) -> None:
    done = run(wrong, "stats")
    assert done.exit_code == 1
    assert wrong in done.stderr
    assert "Traceback" not in done.output
