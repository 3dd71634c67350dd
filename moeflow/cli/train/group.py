"""`moeflow train`: trains models that help a model, and classifiers with experts. One file a kind."""

from __future__ import annotations

import click

from moeflow.cli.train.classifier import classifier
from moeflow.cli.train.predictor import predictor
from moeflow.cli.train.speculator import speculator

EPILOG = """\b
Examples:
  moeflow train speculator
      a small model that guesses for the built-in one, in under half an hour
  moeflow train speculator ~/models/olmoe --pool 3
      three, each good at what the others get wrong
  moeflow train predictor ~/models/olmoe
      knows a token's experts beforehand, for --predictor sida
  moeflow train classifier --data train.tsv --out FOLDER
      sorts texts into classes, with 8 to 256 experts"""


@click.group(epilog=EPILOG)
def train() -> None:
    """Train small models that guess for a large one, and classifiers with experts."""


train.add_command(speculator)
train.add_command(predictor)
train.add_command(classifier)
