"""`moeflow train`: trains speculators and predictors for a model, and classifiers with experts."""

from __future__ import annotations

import click

from moeflow.cli.train.classifier import classifier
from moeflow.cli.train.predictor import predictor
from moeflow.cli.train.speculator import speculator

EPILOG = """\b
Examples:
  moeflow train speculator
      a small draft model for the built-in one, in under half an hour
  moeflow train speculator ~/models/olmoe --pool 3
      three that complement each other
  moeflow train predictor ~/models/olmoe
      predicts each token's experts, for --predictor sida
  moeflow train classifier --data train.tsv --out FOLDER
      sorts texts into classes, with 8 to 256 experts"""


@click.group(epilog=EPILOG)
def train() -> None:
    """Train draft models, expert predictors, and classifiers with experts."""


train.add_command(speculator)
train.add_command(predictor)
train.add_command(classifier)
