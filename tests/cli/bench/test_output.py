"""Tables on terminals of any width, and in files."""

from __future__ import annotations

import re

import pytest

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import show

FIGURES = Table(
    "speeds", ("", *(f"figure {number}" for number in range(12))), (("one", *("1,234.5",) * 12), ("two", *("7",) * 12))
)
WORDS = Table(
    "choices", ("what", "choice", "why"), (("a name", "12", "for many reasons, " * 9),), ("a note " * 30,), words=(2,)
)


@pytest.fixture
def terminal(monkeypatch, capsys):
    def printed(table, columns):
        monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
        monkeypatch.setenv("COLUMNS", str(columns))
        show(table)
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)

    return printed


@pytest.mark.parametrize("columns", [40, 80, 100])
def test_columns_that_do_not_fit_go_on_below(terminal, columns):
    text = terminal(FIGURES, columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    assert text.count("1,234.5") == 12
    assert text.count("one") == text.count("two") > 1
    assert [text.count(f"figure {number} ") for number in range(12)] == [1] * 12


def test_words_are_wrapped_and_begin_at_the_left(terminal):
    text = terminal(WORDS, 60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("many reasons") == 9
    lines = [line for line in text.splitlines() if "for many" in line]
    assert len({line.index("for many") for line in lines}) == 1


def test_a_file_gets_all_figures_beside_each_other(capsys):
    show(FIGURES)
    printed = capsys.readouterr().out
    assert printed.count("one") == 1
    assert max(map(len, printed.splitlines())) > 100
    show(WORDS)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_markdown_says_which_columns_are_words():
    assert "| --- | ---: | --- |" in WORDS.to_markdown()
