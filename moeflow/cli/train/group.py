"""`moeflow train`: trains models that help a model. One file a kind."""

from __future__ import annotations

import click

from moeflow.cli.train.predictor import predictor
from moeflow.cli.train.speculator import speculator

EPILOG = """\b
Examples:
  moeflow train speculator
      a small model that guesses for the built-in one, in under half an hour
  moeflow train speculator ~/models/olmoe --pool 3
      three, each good at what the others get wrong
  moeflow train predictor ~/models/olmoe
      knows a token's experts beforehand, for --predictor sida"""


@click.group(epilog=EPILOG)
def train() -> None:
    """Train small models that guess for a large one."""


train.add_command(speculator)
train.add_command(predictor)
