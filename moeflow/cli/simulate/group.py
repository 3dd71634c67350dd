"""`moeflow simulate`: predicts instead of measuring. One file a prediction: `cache.py` and so on."""

from __future__ import annotations

import click

from moeflow.cli.simulate.cache import cache
from moeflow.cli.simulate.pipeline import pipeline
from moeflow.cli.simulate.serve import serve

EPILOG = """\b
Examples:
  moeflow simulate cache --routing routing.moe
      which cache policy suits this traffic, and what memory would bring
  moeflow simulate pipeline --machine paper-s1 --model mixtral-8x7b \\
      --batch-size 936 --micro-batch 36
      how fast a batch job runs on that machine, by which pipeline
  moeflow simulate serve --machine h100 --model mixtral-8x7b \\
      --weights int8 --rate 8
      how traffic fares there
"""


@click.group(epilog=EPILOG)
def simulate() -> None:
    """Predict what another machine, memory size, pipeline, cache policy or predictor would bring."""


simulate.add_command(cache)
simulate.add_command(pipeline)
simulate.add_command(serve)
