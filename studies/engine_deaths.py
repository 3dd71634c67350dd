"""What clients that hang up leave behind, and engines that die.

    python -m studies.engine_deaths [MODEL] --out FILE

Reports memory, descriptors and threads of both processes after every tenth of the aborts, and after the kills
(SIGKILL). All of it runs on this machine, bounded in count and time. Exits with 1 if a bar is missed. `moeflow chaos`
compares streams during kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path
from typing import Any

import click
import httpx

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text
from moeflow.cli.bench.output import result_options
from moeflow.cli.chaos.deployment import Server, serving
from moeflow.cli.chaos.streams import MAX_WAIT_S, connect, make_bodies
from moeflow.cli.chaos.watch import is_whole
from studies.harness.command import run_study
from studies.harness.records import publish

ABORT_OPTIONS = ["--max-num-seqs", "32", "--kv-cache", "256MiB"]  # all of it is in use after the first tenth
GROWTH_LIMIT_BYTES = 32 * 2**20  # from the first tenth of the aborts to their end, and over all restarts


async def kill(server: Server, client: httpx.AsyncClient) -> None:
    """Kill an engine, and wait until all are ready again."""
    last_s = time.monotonic() + MAX_WAIT_S
    server.engine.kill()
    while await is_whole(client):
        await asyncio.sleep(0.005)
    while not await is_whole(client):
        if time.monotonic() > last_s:
            raise SystemExit("the server did not come back")
        await asyncio.sleep(0.02)


def measure(server: Server) -> dict[str, Any]:
    """Return what both processes hold now."""
    http, engine = server.process, server.engine
    return {
        name: {
            "rss_bytes": process.memory_info().rss,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
        }
        for name, process in (("http", http), ("engine", engine))
    }


async def abort(client: httpx.AsyncClient, body: dict[str, Any], num_events: int) -> None:
    """Send a request and hang up after so many events; 0: before the answer begins."""
    with contextlib.suppress(TimeoutError, httpx.TransportError):
        async with asyncio.timeout(0.05 if not num_events else MAX_WAIT_S):
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    num_events -= line.startswith("data: {")
                    if num_events <= 0:
                        return


async def until_idle(client: httpx.AsyncClient) -> dict[str, Any]:
    """Wait until nothing runs any more; return the statistics."""
    last_s = time.monotonic() + MAX_WAIT_S
    while True:
        stats: dict[str, Any] = (await client.get("/stats")).json()
        if not (stats["num_unfinished"] or stats["num_running"] or stats["num_waiting"] or stats["kv_blocks_used"]):
            return stats
        if time.monotonic() > last_s:
            raise SystemExit(f"requests or blocks are left: {stats}")
        await asyncio.sleep(0.05)


async def run_aborts(server: Server, num_clients: int, num_aborts: int, num_kills: int) -> dict[str, Any]:
    """Hang up so often, then kill the engine so often."""
    rng = random.Random(3)
    bodies = make_bodies(6 * num_clients, 64)
    samples = []
    async with connect(server.url) as client:
        for _ in range(10):
            for _ in range(max(num_aborts // 10 // num_clients, 1)):
                chosen = [rng.choice(bodies) for _ in range(num_clients)]
                await asyncio.gather(*(abort(client, body, rng.randrange(0, 4)) for body in chosen))
            await until_idle(client)
            samples.append(measure(server))
        after_kills = []
        for _ in range(num_kills):
            aborts = [asyncio.create_task(abort(client, rng.choice(bodies), 3)) for _ in range(num_clients)]
            await kill(server, client)
            await asyncio.gather(*aborts)
            await until_idle(client)
            after_kills.append(measure(server))
        stats = await until_idle(client)
    grown = [samples[-1][name]["rss_bytes"] - samples[0][name]["rss_bytes"] for name in ("http", "engine")]
    return {
        "num_aborts": 10 * num_clients * max(num_aborts // 10 // num_clients, 1),
        "num_kills": num_kills,
        "num_restarts": stats["engine_restarts_total"],
        "requests_cancelled_total": stats["requests_cancelled_total"],
        "during_aborts": samples,
        "after_kills": after_kills,
        "http_grown_bytes": grown[0],
        "engine_grown_bytes": grown[1],
        "http_grown_over_kills_bytes": after_kills[-1]["http"]["rss_bytes"] - samples[-1]["http"]["rss_bytes"],
        "http_descriptors_grown": after_kills[-1]["http"]["descriptors"] - samples[0]["http"]["descriptors"],
        "http_threads_grown": after_kills[-1]["http"]["threads"] - samples[0]["http"]["threads"],
    }


def is_good(found: dict[str, Any]) -> bool:
    """Whether the bars are reached."""
    growths = (found["http_grown_bytes"], found["engine_grown_bytes"], found["http_grown_over_kills_bytes"])
    is_flat = max(growths) < GROWTH_LIMIT_BYTES
    return is_flat and found["http_descriptors_grown"] <= 2 and found["http_threads_grown"] <= 1


def kills_table(record: Record) -> Table:
    """Return what streams felt of the kills."""
    pauses = record["pauses"]
    ready, longest = ([pause[name] for pause in pauses] for name in ("ready_again_s", "longest_pause_s"))
    beyond = [pause - again for pause, again in zip(longest, ready, strict=True)]
    rows = (
        ("streams with the tokens of an undisturbed run", f"{record['num_equal']} of {record['num_streams']}"),
        ("streams that ended with an error", str(record["num_errors"])),
        ("engine ready again after, s", spread_text(ready, 1)),
        ("longest pause of a stream, s", spread_text(longest, 1)),
        ("of that beyond the time to be ready, s", spread_text(beyond, 1)),
    )
    engines = f", one of {record['num_replicas']} engines each time" if record.get("num_replicas", 1) > 1 else ""
    title = f"{record['num_kills']} kills under {record['num_streams']} streams{engines}: median (range)"
    return Table(title, ("", ""), rows)


def aborts_table(record: Record) -> Table:
    """Return what both processes hold, in the course of it."""
    during, after = record["during_aborts"], record["after_kills"]
    samples = {
        f"{record['num_aborts'] // 10} aborts": during[0],
        f"{record['num_aborts']} aborts": during[-1],
        f"{record['num_kills']} kills more": after[-1],
    }
    rows = tuple(
        (
            name,
            *(f"{sample[process]['rss_bytes'] / 2**20:.0f}" for process in ("http", "engine")),
            *(str(sample["http"][what]) for what in ("descriptors", "threads")),
        )
        for name, sample in samples.items()
    )
    columns = ("after", "server MiB", "engine MiB", "server's descriptors", "threads")
    return Table("Clients that hang up", columns, rows)


@click.command(help=__doc__)
@click.argument("model", required=False)
@click.option("--clients", default=32, show_default=True)
@click.option("--kills", default=20, show_default=True)
@click.option("--aborts", default=10_000, show_default=True)
@result_options
def main(model: str | None, clients: int, kills: int, aborts: int, as_json: bool, out: Path | None) -> int:
    """Run it; return 1 if more is left behind than may be."""
    with serving(model, *ABORT_OPTIONS) as server:
        found = asyncio.run(run_aborts(server, clients, aborts, kills))
    publish("engine_aborts", aborts_table, out, as_json=as_json, seed=7, **found)
    return 0 if is_good(found) else 1


if __name__ == "__main__":
    run_study(main)
