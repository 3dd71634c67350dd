"""The commands of `run.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks.peers.commands.measuring import check, measure, show_records
from benchmarks.peers.commands.preparing import setup, write_model
from benchmarks.peers.commands.scoring import perplexity
from benchmarks.peers.commands.servers import serve, speculate
from benchmarks.peers.commands.starting import start
from benchmarks.peers.scores_table import scores_table
from benchmarks.peers.starts_table import starts_table
from moeflow.bench.records import read
from moeflow.cli.bench.output import show as show_table
from moeflow.core.errors import MoeflowError


@click.group()
def main() -> None:
    """Measure our engine against others, in turns."""


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
    try:
        main()
    except MoeflowError as error:
        sys.exit(f"error: {error}")
