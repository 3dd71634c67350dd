"""`moeflow bench`: measures, and keeps the records. One file a measurement: `engine.py`, ..."""

from __future__ import annotations

import click

from moeflow.cli.bench.batch import batch
from moeflow.cli.bench.engine import engine
from moeflow.cli.bench.quality import quality
from moeflow.cli.bench.serve import serve

EPILOG = """\b
Examples:
  moeflow bench engine
      how fast is the built-in model here, and how fast could it be?
  moeflow bench serve --rate 1 --rate 2
      how does it bear requests that come at random?
  moeflow bench batch --workload reasoning
      what does a job of many requests take, and padding cost?
  moeflow bench quality --dtype bfloat16
      what does a smaller format cost in quality?
"""


@click.group(epilog=EPILOG)
def bench() -> None:
    """Measure speed and quality, against what the machine could do at best."""


bench.add_command(engine)
bench.add_command(serve)
bench.add_command(batch)
bench.add_command(quality)
