import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from moeflow.cli import progress as module
from moeflow.cli.plain_progress import duration_text, time_left
from moeflow.cli.progress import bar, progress_bar, steps


@pytest.fixture
def clock(monkeypatch):
    """Time controlled by the test, for plain lines and for rich's tasks."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.s)
    return now


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal would be drawn."""
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100)
    monkeypatch.setattr(module, "Console", lambda **_: console)
    return drawn


def test_without_a_terminal_a_line_is_printed_now_and_then_with_the_time_left(clock, capsys):
    with progress_bar("Making") as report:
        for done in range(41):  # 40 seconds, a call each second
            report(done, 160)
            clock.s += 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Making: 1%"  # 2 of 160 in 2 s, which say little of the rest
    assert lines[1] == "Making: 8%, about 2 min left"
    assert lines[-1] == "Making: 20%, about 2 min left"
    assert len(lines) == 4


def test_short_work_prints_nothing_without_a_terminal(capsys):
    with progress_bar("Loading") as report:
        report(1, 2)
    with bar(2) as shown:
        shown.say("first")
        shown.advance()
    with steps("Planning") as say:
        say("memory")
    assert capsys.readouterr().err == ""


def test_steps_are_told_without_a_terminal(clock, capsys):
    with steps("Planning") as say:
        for what in ("memory and arithmetic", "the disk", "the best policy"):
            say(what)
            clock.s += 6
    assert capsys.readouterr().err == "Planning: the disk\n"


def test_counted_work_is_told_without_a_terminal(clock, capsys):
    with bar(4) as shown:
        shown.say("prefill 512")
        clock.s += 20
        shown.advance()
    assert capsys.readouterr().err == "prefill 512: 1 of 4, about 60 s left\n"


def test_a_terminal_is_shown_a_bar_with_the_time_left(clock, terminal):
    with module.drawn(*_columns()) as progress:
        task = progress.add_task("Making", total=100)
        clock.s += 10
        progress.update(task, completed=25)
        progress.refresh()
        assert "25%" in terminal.getvalue()
        assert "about 30 s left" in terminal.getvalue()


def _columns():
    return module.TextColumn("{task.description}"), module.TaskProgressColumn(), module.TimeLeftColumn()


@pytest.mark.parametrize(
    ("elapsed_s", "done", "total", "text"),
    [
        (10, 25, 100, "about 30 s left"),
        (1, 25, 100, ""),  # too early to tell
        (2.9, 10, 100, ""),  # loading begins slowly, and a similar load ended after 3 s
        (10, 4, 100, ""),
        (10, 0, 100, ""),
        (10, 100, 100, ""),
        (10, 5, 0, ""),  # of unknown extent
        (60, 1, 1000, "about 16 h 39 min left"),
        (59, 1, 1000, ""),  # the first thousandth may have been slow
    ],
)
def test_the_time_left_is_estimated_once_it_can_be(elapsed_s, done, total, text):
    assert time_left(elapsed_s, done, total) == text


def test_durations_are_whole_numbers():
    assert [duration_text(s) for s in (3.4, 99, 100, 3599, 12_000)] == ["3 s", "99 s", "2 min", "60 min", "3 h 20 min"]
