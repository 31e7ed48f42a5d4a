"""Stage lines, plain and on a terminal."""

from __future__ import annotations

import io

from headrace.cli.progress import StageReporter
from headrace.core.health import Stage, StageProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Ticking:
    """A clock of half seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def lines(stream: io.StringIO) -> list[str]:
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_each_stage_is_one_line_with_its_seconds() -> None:
    out = io.StringIO()
    with StageReporter(out) as reporter:
        reporter.follow((StageProgress(Stage.RESOLVE, 1.0, 0.04, "tiny"),))
        reporter.follow(
            (
                StageProgress(Stage.RESOLVE, 1.0, 0.04, "tiny"),
                StageProgress(Stage.LOAD_WEIGHTS, 0.3, 0.5),
            )
        )
        assert lines(out) == ["resolve model 0.0 s tiny"]
        reporter.follow(
            (
                StageProgress(Stage.RESOLVE, 1.0, 0.04, "tiny"),
                StageProgress(Stage.LOAD_WEIGHTS, 1.0, 1.25),
                StageProgress(Stage.WARM_UP, 0.0, 0.0),
            )
        )
    assert lines(out) == ["resolve model 0.0 s tiny", "load weights 1.2 s"]


def test_a_stage_that_was_left_behind_is_over() -> None:
    out = io.StringIO()
    with StageReporter(out) as reporter:
        reporter.follow(
            (
                StageProgress(Stage.DOWNLOAD, 0.99, 3.0),
                StageProgress(Stage.LOAD_WEIGHTS, 0.5, 0.1),
            )
        )
    assert lines(out) == ["download 3.0 s"]


def test_updates_of_one_stage_are_one_line() -> None:
    out = io.StringIO()
    with StageReporter(out, Ticking()) as reporter:
        reporter.update(Stage.DOWNLOAD, 0.1, "93 MB")
        reporter.update(Stage.DOWNLOAD, 0.9, "93 MB")
        assert lines(out) == []
    assert lines(out) == ["download 0.5 s"]


def test_a_stage_that_broke_is_not_told_as_done() -> None:
    out = io.StringIO()
    try:
        with StageReporter(out, Ticking()) as reporter:
            reporter.update(Stage.DOWNLOAD, 0.1)
            raise RuntimeError
    except RuntimeError:
        pass
    assert lines(out) == []


def test_a_terminal_shows_the_same_lines_and_odd_words_do_no_harm() -> None:
    out = Terminal()
    with StageReporter(out) as reporter:
        reporter.follow((StageProgress(Stage.DOWNLOAD, 0.4, 0.1, "[/red] 50%"),))
        reporter.follow(
            (
                StageProgress(Stage.DOWNLOAD, 1.0, 0.2, "[/red] 50%"),
                StageProgress(Stage.LOAD_WEIGHTS, 0.5, 0.1),
            )
        )
    assert any("download" in line and "[/red] 50%" in line for line in lines(out))
