"""`moeflow simulate`: predicts instead of measuring. One file a prediction: `cache.py` and so on."""

from __future__ import annotations

import click

from moeflow.cli.simulate.asynchronous import simulate_async
from moeflow.cli.simulate.cache import cache
from moeflow.cli.simulate.paper import paper
from moeflow.cli.simulate.parallel import parallel
from moeflow.cli.simulate.pipeline import pipeline
from moeflow.cli.simulate.serve import serve

EPILOG = """\b
Examples:
  moeflow simulate async --machine h100 --model mixtral-8x7b --ranks 8
      what devices gain that do not wait for each other after each layer
  moeflow simulate cache --routing routing.moe
      which cache policy suits this traffic, and what memory would bring
  moeflow simulate paper
      how near predictions come to what MoE-Lightning published
  moeflow simulate parallel --machine h100 --model mixtral-8x7b \\
      --ranks 8 --skew 0.6
      how experts are best laid out over devices
  moeflow simulate pipeline --machine paper-s1 --model mixtral-8x7b \\
      --batch-size 936 --micro-batch 36
      how fast a batch job runs on that machine, by which pipeline
  moeflow simulate serve --machine h100 --model mixtral-8x7b \\
      --weights int8 --rate 8
      how traffic fares there
"""


@click.group(epilog=EPILOG)
def simulate() -> None:
    """Predict what another machine, memory size, layout, pipeline, cache policy or predictor would bring."""


simulate.add_command(simulate_async)
simulate.add_command(cache)
simulate.add_command(paper)
simulate.add_command(parallel)
simulate.add_command(pipeline)
simulate.add_command(serve)
