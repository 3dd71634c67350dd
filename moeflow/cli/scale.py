"""`moeflow scale`: the number of engines of a server whose replicas are on a Ray cluster."""

from __future__ import annotations

import time

import click

from moeflow.cli.api_key import api_key_option
from moeflow.cli.server_answers import DEFAULT_URL, answer, server_at

EPILOG = """\b
Examples:
  moeflow serve olmoe --replicas 2 --ray-address auto
  moeflow scale 5
      three more engines, on nodes with enough free CPUs
  moeflow scale 1 --no-wait
      requests of the four others continue in the one that stays

New engines begin as soon as the cluster has a place for them: an autoscaler of Ray may add nodes for that."""

_LOOK_S = 0.5


@click.command(epilog=EPILOG)
@click.argument("number", type=click.IntRange(1))
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Address of the server.")
@click.option("--model", help="Its name, if the server has several.")
@click.option("--wait/--no-wait", default=True, help="Wait until all engines are ready.  [default: wait]")
@api_key_option("The server's key.")
def scale(number: int, url: str, model: str | None, wait: bool, api_key: str | None) -> None:
    """Have NUMBER engines for a server that was started with --replicas and --ray-address."""
    with server_at(url, api_key) as server:
        body = {"num_replicas": number} | ({"model": model} if model else {})
        found = answer(server, "POST", "/replicas", body)
        click.echo(f"{found['num_replicas_before']} -> {number} replicas")
        while wait:
            health = answer(server, "GET", "/health")
            ready, total = health["num_replicas_ready"], health["num_replicas"]
            wait = ready != total  # another number may have been set since
            click.echo(f"\r{ready} of {total} ready", nl=not wait, err=True)
            time.sleep(_LOOK_S if wait else 0)
