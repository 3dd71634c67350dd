"""ExpertFlow's published figures beside simulated and measured ones."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import click

from moeflow.bench.plots import plot_latencies
from moeflow.cli.bench.output import result_options, show
from moeflow.cli.progress import bar
from studies.harness.records import publish
from studies.paper import thesis, thesis_measured
from studies.paper.recorded import recorded
from studies.paper.thesis_tables import measured_tables, simulated_tables, speculation_table

SIMULATED = "simulated"
MEASURED = "measured"
EPILOG = """\b
Examples:
  python -m studies.paper expertflow
  python -m studies.paper expertflow --part measured --plots images

Tables 6.1 to 6.3 and figures 6.2 to 6.6 of the thesis. Simulated is the thesis' traffic for GPT-MoE on four T4s; no
rate of ExpertFlow is fitted. Measured is the same kind of traffic for a small GPT-MoE through the engine on this
machine. They have tables of their own. Figure 6.6 is a record of studies.speculation.
"""


class _Pictures:
    """Draws the requests of both policies at each rate, if a folder is given."""

    def __init__(self, folder: Path | None, part: str) -> None:
        self._folder, self._part = folder, part
        self._requests: dict[float, dict[str, list[thesis.Run]]] = defaultdict(dict)

    def add(self, policy: str, rate: float, requests: thesis.Run) -> None:
        """Keep the requests of a run."""
        self._requests[rate][policy] = [requests]

    def draw(self) -> None:
        """Write a picture for each rate."""
        for rate, systems in self._requests.items() if self._folder else ():
            assert self._folder is not None
            plot_latencies(systems, rate, self._folder / f"expertflow-{self._part}-{rate:g}.png")


@click.command("expertflow", epilog=EPILOG, context_settings={"show_default": True})
@click.option("--part", "parts", type=click.Choice([SIMULATED, MEASURED]), multiple=True, default=(SIMULATED, MEASURED))
@click.option("--requests", type=click.IntRange(2), default=thesis.NUM_REQUESTS, help="Simulated for each rate.")
@click.option("--measured-requests", type=click.IntRange(2), default=256, help="Measured for each rate.")
@click.option("--plots", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Draw latencies here.")
@result_options
def expertflow(
    parts: tuple[str, ...],
    requests: int,
    measured_requests: int,
    plots: Path | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Compare the figures of ExpertFlow's thesis with simulated and measured ones; it takes some minutes."""
    if SIMULATED in parts:
        pictures = _Pictures(plots, SIMULATED)
        with bar(thesis.num_steps()) as shown:

            def on_run(what: str) -> None:
                shown.say(what)
                shown.advance()

            found = thesis.simulations(requests, on_run, pictures.add)
        publish("expertflow", simulated_tables, out, as_json=as_json, **found)
        pictures.draw()
    if MEASURED in parts:
        pictures = _Pictures(plots, MEASURED)
        with bar(thesis_measured.NUM_STEPS) as shown, tempfile.TemporaryDirectory() as folder:

            def on_measured(what: str) -> None:
                shown.say(what)
                shown.advance()

            found = thesis_measured.measure(Path(folder), measured_requests, on_measured, pictures.add)
        publish("expertflow_measured", measured_tables, out, as_json=as_json, **found)
        pictures.draw()
    if not as_json:
        show(speculation_table(recorded("speculation")[-1]))
