"""The commands of `run.py`."""

from __future__ import annotations

from pathlib import Path

import click

from moeflow.bench.records import read
from moeflow.cli.bench.output import show as show_table
from studies.harness.command import run_study
from studies.peers.commands.measuring import check, measure, show_records
from studies.peers.commands.preparing import setup, write_model
from studies.peers.commands.scoring import perplexity
from studies.peers.commands.servers import serve, speculate
from studies.peers.commands.starting import start
from studies.peers.scores_table import scores_table
from studies.peers.starts_table import starts_table


@click.group()
def main() -> None:
    """Measure our engine against others, alternately."""


@main.command("show")
@click.argument("files", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
def show_files(files: tuple[Path, ...]) -> None:
    """Print the tables of records measured before."""
    records = read(files)
    show_records([record for record in records if record["kind"] == "peers"])
    for kind, table in (("peer_starts", starts_table), ("peer_scores", scores_table)):
        found = [record for record in records if record["kind"] == kind]
        if found:
            show_table(table(found))


for command in (setup, write_model, check, measure, start, perplexity, serve, speculate):
    main.add_command(command)

if __name__ == "__main__":
    run_study(main)
