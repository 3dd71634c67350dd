"""MoE-Lightning's published figures beside predictions for the same settings."""

from __future__ import annotations

from pathlib import Path

import click

from moeflow.cli.bench.output import result_options
from moeflow.cli.progress import bar
from studies.harness.records import publish
from studies.paper.one_device import CELLS, predictions
from studies.paper.several_devices import HOSTS, LINK_GB_PER_S, SCALINGS, case_study, scaling
from studies.paper.tables import tables

EPILOG = """\b
Examples:
  python -m studies.paper moe-lightning
  python -m studies.paper moe-lightning --json

Nothing is measured, and no published figure of a whole model went into a prediction. Columns add one term after the
other to data sheets. The settings are those of tables 4 and 5 and figure 7, several T4s (figures 7 and 8) and two A100s
(figure 10).
"""


@click.command("moe-lightning", epilog=EPILOG)
@result_options
def moe_lightning(as_json: bool, out: Path | None) -> None:
    """Hold the simulator against what MoE-Lightning published; it takes some minutes."""
    scaled = sum(len(one.rows) for one in SCALINGS)
    points = len(HOSTS) * len(LINK_GB_PER_S)
    with bar(len(CELLS) + scaled + points) as shown:

        def on_cell(title: str) -> None:
            shown.say(title)
            shown.advance()

        cells, found, case = predictions(on_cell), [], []
        shown.say("two and four T4s")
        for one in scaling():
            found.append(one)
            shown.advance()
        shown.say("two A100-80G")
        for point in case_study():
            case.append(point)
            shown.advance()
    publish("paper", tables, out, as_json=as_json, cells=cells, scaling=found, case_study=case)
