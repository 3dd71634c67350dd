"""`moeflow status`: a running server, its engines on each machine, its queue and its jobs."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any, Final

import click
import httpx

from moeflow.cli.api_key import api_key_option
from moeflow.cli.plain_progress import duration_text
from moeflow.cli.server_answers import DEFAULT_URL, answer, server_at
from moeflow.core.errors import ConfigError

EPILOG = """\b
Examples:
  moeflow status
  moeflow status http://a.lan:8000 --watch
  moeflow status --json | jq -r '.replicas[].state'

Tokens a second are those of the last few seconds. The exit code is 1 if no server answers."""

_PAUSE_S: Final = 2.0
_NUM_JOBS: Final = 100  # the newest ones
_COLUMNS: Final = ("REPLICA", "HOST", "STATE", "RUNNING", "WAITING", "TOKENS/S", "KV", "RESTARTS")
_IS_NUMBER: Final = (False, False, False, True, True, True, True, True)


@click.command(epilog=EPILOG)
@click.argument("url", metavar="[URL]", default=DEFAULT_URL)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON; with --watch, one object a line.")
@click.option("--watch", is_flag=True, help="Repeat every two seconds. Ctrl-C ends it.")
@api_key_option("The server's key.")
def status(url: str, as_json: bool, watch: bool, api_key: str | None) -> None:
    """Show a running server: its model, the engines on each machine, their load, its queue and its jobs.

    URL is the server's address, by default http://127.0.0.1:8000.
    """
    with server_at(url, api_key) as server:
        while True:
            found = _look(server)
            if watch and not as_json:
                click.clear()
            click.echo(json.dumps(found, indent=None if watch else 2) if as_json else "\n".join(_lines(found)))
            if not watch:
                return
            time.sleep(_PAUSE_S)


def _look(server: httpx.Client) -> dict[str, Any]:
    """Return the server's state. Raises: EngineError if no server answers, ConfigError if it refuses."""
    stats = answer(server, "GET", "/stats")
    replicas = [
        {"host": it["host"], "state": it["state"], "activity": it["activity"]} | _load(it) for it in stats["replicas"]
    ]
    return {
        "url": str(server.base_url),
        "version": answer(server, "GET", "/version")["version"],
        "status": stats["status"],
        "uptime_s": stats["uptime_s"],
        "models": [it["name"] for it in stats["models"]],
        "num_unfinished": stats["num_unfinished"],
        **_load(stats),
        "replicas": replicas,
        "jobs": _jobs(server),
    }


def _load(stats: dict[str, Any]) -> dict[str, Any]:
    """Return the load of one engine, or of all."""
    return {
        "num_running": stats["num_running"],
        "num_waiting": stats["num_waiting"],
        "tokens_per_second": stats["tokens_per_second"],
        "kv_share": stats["kv_blocks_used"] / max(stats["kv_blocks_total"], 1),
        "num_ranks": len(stats["ranks"]) or 1,
        "num_restarts": stats["engine_restarts_total"],
    }


def _jobs(server: httpx.Client) -> dict[str, int]:
    """Return how many of the newest batch jobs have which state."""
    try:
        jobs = answer(server, "GET", f"/v1/batches?limit={_NUM_JOBS}")["data"]
    except ConfigError:  # a server that keeps none
        return {}
    return dict(Counter(job["status"] for job in jobs))


def _lines(found: dict[str, Any]) -> list[str]:
    """Write a server's state for people."""
    replicas = found["replicas"]
    num_ready = sum(it["state"] == "ready" for it in replicas)
    names = ", ".join(filter(None, found["models"])) or "no model yet"
    jobs = ", ".join(f"{number} {state}" for state, number in sorted(found["jobs"].items())) or "none"
    uptime = duration_text(found["uptime_s"])
    load = f"{found['num_running']} running, {found['num_waiting']} waiting, {found['tokens_per_second']:.0f} tokens/s"
    return [
        f"{found['url']}: {found['status']}, {names}, moeflow {found['version']}, up {uptime}",
        f"{num_ready} of {len(replicas)} engines ready; {load}",
        f"jobs: {jobs}",
        *(["", *_table(replicas)] if replicas else []),
    ]


def _table(replicas: list[dict[str, Any]]) -> list[str]:
    rows = [_COLUMNS, *(_row(number, it) for number, it in enumerate(replicas))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(_padded, row, widths, _IS_NUMBER)).rstrip() for row in rows]


def _padded(cell: str, width: int, is_number: bool) -> str:
    return cell.rjust(width) if is_number else cell.ljust(width)


def _row(number: int, replica: dict[str, Any]) -> tuple[str, ...]:
    ranks = f", {replica['num_ranks']} ranks" if replica["num_ranks"] > 1 else ""
    return (
        str(number),
        replica["host"] or "(server)",
        (replica["activity"] or replica["state"]) + ranks,
        str(replica["num_running"]),
        str(replica["num_waiting"]),
        f"{replica['tokens_per_second']:.0f}",
        f"{replica['kv_share']:.0%}",
        str(replica["num_restarts"]),
    )
