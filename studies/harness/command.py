"""Runs a study's command, and names it as a user types it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from moeflow.cli.help import name_ranges
from moeflow.cli.main import run_and_exit


def program() -> str:
    """Return how the running study is started: "python -m studies.NAME"."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else sys.argv[0]


def command_line() -> list[str]:
    """Return the running command line as words, for a record."""
    return [*program().split(), *sys.argv[1:]]


def run_study(command: click.Command, args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit as moeflow's verbs do: an error is one line. `args` stands for the command line's."""
    name_ranges(command)
    run_and_exit(lambda: command.main(args, prog_name=program(), standalone_mode=False))
