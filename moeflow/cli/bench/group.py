"""`moeflow bench`: measures, and writes down what it measured. One file a measurement: `engine.py`, ..."""

from __future__ import annotations

import click

from moeflow.cli.bench.batch import batch
from moeflow.cli.bench.engine import engine
from moeflow.cli.bench.parallel import parallel
from moeflow.cli.bench.peers import peers
from moeflow.cli.bench.quality import quality
from moeflow.cli.bench.serve import serve
from moeflow.cli.bench.sida import sida
from moeflow.cli.bench.speculation import speculation

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
  moeflow bench speculation --speculator suffix
      how much faster do guessed tokens make an answer?
  moeflow bench sida reviews --data dev.tsv
      what is it worth to know a text's experts beforehand?
  moeflow bench parallel --experts 128
      how are the experts of a layer best laid out over ranks?
  moeflow bench peers measure
      how fast are llama.cpp, ik_llama.cpp, vLLM, transformers here?
"""


@click.group(epilog=EPILOG)
def bench() -> None:
    """Measure speed and quality, against what the machine could do at best."""


bench.add_command(engine)
bench.add_command(serve)
bench.add_command(batch)
bench.add_command(quality)
bench.add_command(speculation)
bench.add_command(sida)
bench.add_command(parallel)
bench.add_command(peers)
