"""Runs a study's command in this process, errors and exit code included."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import click
from click.testing import CliRunner, Result

from studies.harness.command import run_study


@dataclass
class Started:
    """What click's runner takes for a command."""

    command: click.Command
    name: str = "study"

    def main(self, args: Any, **_: object) -> None:
        run_study(self.command, args)


def command_of(study: str) -> click.Command:
    """Return the command of a study: the one that its module runs."""
    package = importlib.util.find_spec(study).submodule_search_locations is not None
    module = importlib.import_module(f"{study}.__main__" if package else study)
    names = ("main", *study.split("."), "simulate_async")
    return next(found for name in names if isinstance(found := getattr(module, name, None), click.Command))


def run(study: str, *args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(Started(command_of(study)), args, input=stdin)
