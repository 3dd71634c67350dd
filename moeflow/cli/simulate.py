"""`moeflow simulate`: predicts instead of measuring. One file a prediction: `simulate_cache.py`."""

from __future__ import annotations

import click

from moeflow.cli.simulate_cache import cache

EPILOG = """\b
Examples:
  moeflow simulate cache --routing routing.moe        which cache policy suits this traffic, and what memory would bring
"""


@click.group(epilog=EPILOG)
def simulate() -> None:
    """Predict what another memory size, cache policy or predictor would bring."""


simulate.add_command(cache)
