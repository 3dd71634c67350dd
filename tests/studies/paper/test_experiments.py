"""The list of the papers' tables and figures: it is complete, and its commands can be typed."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from moeflow.cli.main import main
from studies.paper.experiments import EXPERIMENTS, PAPERS, STATUSES
from tests.studies import running

# Named in the requirements of each paper.
NAMED = {
    "ExpertFlow": {"figure 3.1", "figure 3.2", "figure 3.3", "table 6.1", "table 6.2", "table 6.3", "figure 6.6"}
    | {f"figure 6.{number}" for number in range(2, 6)},
    "MoE-Lightning": {*(f"figure {number}" for number in range(4, 11)), *(f"table {number}" for number in range(2, 6))},
    "Sliced experts": {f"figure 6.{number}" for number in range(1, 7)},
    "SiDA": {"table 2", "table 3", "table 4", "figure 4", *(f"figure {number}" for number in range(8, 12))},
}


def parse(line: str) -> None:
    """Parse a command line as click does, without running it."""
    program, *words = shlex.split(line)
    if program == "moeflow":
        command: click.Command = main
    else:
        assert (program, words[0]) == ("python", "-m")
        command, words = running.command_of(words[1]), words[2:]
    context = click.Context(command)
    while isinstance(command, click.Group):
        _, found, words = command.resolve_command(context, words)
        assert found is not None, line
        command, context = found, click.Context(found)
    command.make_parser(context).parse_args(words)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_named_result_has_one_row(paper):
    rows = [it.number for it in EXPERIMENTS if it.paper == paper]
    assert len(rows) == len(set(rows))
    assert NAMED[paper] <= set(rows)


@pytest.mark.parametrize("line", sorted({it.command for it in EXPERIMENTS}))
def test_every_command_can_be_typed(line):
    parse(line)


@pytest.mark.parametrize(
    "line",
    ["moeflow serv", "moeflow serve --replica 2", "python -m studies.paper figure", "python -m studies.sida --dat x"],
)
def test_commands_that_cannot_are_found(line):
    with pytest.raises(click.UsageError):
        parse(line)


def test_every_status_has_its_cause_in_one_sentence():
    for it in EXPERIMENTS:
        assert it.status in STATUSES
        assert it.cause.endswith("."), it
        assert not re.search(r"\. [A-Z]", it.cause), it
        assert len(it.cause.split()) <= 25, it


def test_the_list_counts_all():
    shown = running.run("studies.paper", "list")
    assert shown.exit_code == 0, shown.output
    assert "table 6.1" in shown.output
    counts = [int(number) for number in re.findall(r"\d+", shown.output.rpartition("Of all:")[2])]
    assert sum(counts) == len(EXPERIMENTS)
