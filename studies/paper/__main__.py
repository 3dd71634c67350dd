"""The four papers: each one's published results beside ours, and the list of all."""

from __future__ import annotations

import click

from moeflow.cli.bench.output import show
from studies.harness.command import run_study
from studies.paper.experiments import experiments_tables, status_counts
from studies.paper.expertflow import expertflow
from studies.paper.moe_lightning import moe_lightning
from studies.paper.recorded import recorded
from studies.paper.sida_table import sida_table
from studies.parallel.paper import paper as sliced_experts

EPILOG = """\b
Examples:
  python -m studies.paper list
  python -m studies.paper expertflow
  python -m studies.paper moe-lightning
  python -m studies.paper sliced-experts
  python -m studies.paper sida
"""


@click.group(epilog=EPILOG)
def paper() -> None:
    """Compare published results of the four papers with predictions and measurements."""


@paper.command("list")
def list_experiments() -> None:
    """List the papers' tables and figures, the command of each, and its status."""
    for table in experiments_tables():
        show(table)
    click.echo(f"Of all: {status_counts()}.")


@paper.command()
def sida() -> None:
    """Compare the published results of SiDA with kept records of studies.sida."""
    show(sida_table(recorded("sida")))


paper.add_command(expertflow)
paper.add_command(moe_lightning)
paper.add_command(sliced_experts, "sliced-experts")

if __name__ == "__main__":
    run_study(paper)
