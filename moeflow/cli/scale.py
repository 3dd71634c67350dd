"""`moeflow scale`: the number of engines of a server whose replicas are on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping

import click
import httpx

from moeflow.cli.api_key import api_key_option
from moeflow.core.errors import ConfigError, EngineError

EPILOG = """\b
Examples:
  moeflow serve olmoe --replicas 2 --ray-address auto
  moeflow scale 5
      three more engines, on nodes with enough free CPUs
  moeflow scale 1 --no-wait
      requests of the four others continue in the one that stays

New engines begin as soon as the cluster has a place for them: an autoscaler of Ray may add nodes for that."""

_LOOK_S = 0.5
_TIMEOUT_S = 30.0


@click.command(epilog=EPILOG)
@click.argument("number", type=click.IntRange(1))
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the server.")
@click.option("--model", help="Its name, if the server has several.")
@click.option("--wait/--no-wait", default=True, help="Wait until all engines are ready.  [default: wait]")
@api_key_option("The server's key.")
def scale(number: int, url: str, model: str | None, wait: bool, api_key: str | None) -> None:
    """Have NUMBER engines for a server that was started with --replicas and --ray-address."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=_TIMEOUT_S) as server:
        body = {"num_replicas": number} | ({"model": model} if model else {})
        found = _answer(server, "POST", "/replicas", body)
        click.echo(f"{found['num_replicas_before']} -> {number} replicas")
        while wait:
            health = _answer(server, "GET", "/health")
            ready, total = health["num_replicas_ready"], health["num_replicas"]
            wait = ready != total  # another number may have been set since
            click.echo(f"\r{ready} of {total} ready", nl=not wait, err=True)
            time.sleep(_LOOK_S if wait else 0)


def _answer(
    server: httpx.Client, method: str, path: str, body: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return a server's answer. Raises: EngineError if there is none, ConfigError if it refuses."""
    try:
        response = server.request(method, path, json=body)
        found = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise EngineError(f"no server of moeflow answers at {server.base_url}: {error}. Name it with --url") from None
    if response.is_error:
        refusal = found.get("error", found) if isinstance(found, dict) else found
        raise ConfigError(str(refusal.get("message", refusal)) if isinstance(refusal, dict) else str(refusal))
    return dict(found)
