"""Processor time that a server's HTTP process takes for a streamed token, before engines that sleep.

    python -m studies.front_cost MODEL --out FILE

MODEL is a folder with a tokenizer. The engine is a process of this machine (`ipc`), or kept by another process over
ZeroMQ with CURVE (`curve`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.core.errors import EngineError
from moeflow.engine.generator import Generator
from moeflow.engine.ranks.join import JoinSettings
from moeflow.processes.nodes import keeper
from moeflow.processes.nodes.engine_places import EnginePlaces
from moeflow.processes.process_client import ProcessEngine
from moeflow.processes.restart_limits import RestartLimits
from moeflow.processes.supervisor import Supervisor
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.http_server import HttpServer
from moeflow.server.listener import listen, url
from moeflow.text.tokenizer import Tokenizer
from studies.harness.command import run_study
from studies.harness.records import publish
from studies.sleeping_engine import PASS_S, SleepingHost, sleeping_config

CHANNELS = ("ipc", "curve")
TOKEN = b"0123456789abcdef0123456789abcdef"
PROMPT = "The quick brown fox jumps over the lazy dog, and all of the others sleep in the warm sun of the afternoon. "


async def serve_front(model: str, channel: str, max_num_seqs: int) -> None:
    """Serve until this process is ended."""
    config = sleeping_config(model, max_num_seqs=max_num_seqs)
    launch, places = SleepingHost.launch, None
    if channel == "curve":
        places = EnginePlaces(TOKEN, "", lambda offer: "", "a keeper")
        places.open("127.0.0.1")
        print(places.port, flush=True)
    start = partial(ProcessEngine.start, config, launch=places.launch if places else launch)
    client = Supervisor([start], RestartLimits, scheduler=config.scheduler, places=places)
    await client.load()
    settings = ServerConfig(port=0, max_queue=1024)
    app = create_app(Generator(client, Tokenizer.load(model)), settings)
    listener = listen(settings)
    print(url(listener), flush=True)
    await HttpServer(app).serve(sockets=[listener])


async def keep_asleep(model: str, port: int) -> None:
    """Keep a sleeping engine for a front until this process is ended."""
    keeper.LocalHost = SleepingHost  # type: ignore[misc]
    keeper.checked_config = lambda config, fingerprint, settings: config  # there is no checkpoint
    await keeper.keep(JoinSettings(host="127.0.0.1", port=port, token=TOKEN, model=model), print)


@contextlib.contextmanager
def started(model: str, channel: str, *, streams: int, pass_s: float) -> Iterator[tuple[psutil.Process, str]]:
    """Run a front, and yield its process and address."""
    environment = {**os.environ, PASS_S: str(pass_s)}
    me = [sys.executable, "-m", "studies.front_cost", model, "--streams", str(streams), "--channel", channel]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))

        def start(*role: str) -> subprocess.Popen[str]:
            process = subprocess.Popen([*me, *role], stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            return process

        front = start("--as", "front")
        assert front.stdout is not None
        if channel == "curve":
            start("--as", front.stdout.readline().strip())
        if not (address := front.stdout.readline().strip()):
            log.seek(0)
            raise EngineError(f"the front has not started: {log.read()[-2000:]}")
        yield psutil.Process(front.pid), address


def read_streams(address: str, path: str, *, streams: int, tokens: int, front: psutil.Process) -> dict[str, float]:
    """Read so many streams at once; return tokens, and the front's processor time from the first token on."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    body: dict[str, Any] = {"max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    selector = selectors.DefaultSelector()
    begun_s, begun = time.monotonic(), front.cpu_times()
    for _ in range(streams):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ)
    num_events = 0
    while selector.get_map():
        for key, _ in selector.select():
            received = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            num_events += received.count(b"data: {")
            if not received:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    ended = front.cpu_times()
    used_s = ended.user + ended.system - begun.user - begun.system
    if num_events < 0.8 * streams * tokens:  # special tokens have none
        raise EngineError(f"{num_events} events instead of {streams * tokens}")
    return {"tokens": streams * tokens, "used_s": used_s, "wall_s": time.monotonic() - begun_s}


def table(record: Record) -> Table:
    """Return the processor times."""
    rows = [
        (it["channel"], it["path"], str(it["streams"]), f"{it['us_per_token']:.0f}", f"{it['tokens_per_s']:.0f}")
        for it in record["rounds"]
    ]
    columns = ("channel", "endpoint", "streams", "us a token", "tokens/s")
    return Table("Processor time of a front for a streamed token", columns, tuple(rows))


@click.command(help=__doc__)
@click.argument("model")
@click.option("--streams", default=(64, 256), show_default=True, multiple=True, help="At once.")
@click.option("--tokens", default=300, show_default=True, help="Of each stream.")
@click.option("--channel", "channels", type=click.Choice(CHANNELS), default=CHANNELS, multiple=True)
@click.option("--path", "paths", default=("/v1/completions",), show_default=True, multiple=True)
@click.option("--stream-pass-us", default=400.0, show_default=True, help="Of a pass, for each stream.")
@click.option("--as", "role", default="", hidden=True, help="The front, or the keeper for that port of it.")
@result_options
def main(
    model: str,
    streams: tuple[int, ...],
    tokens: int,
    channels: tuple[str, ...],
    paths: tuple[str, ...],
    stream_pass_us: float,
    role: str,
    as_json: bool,
    out: Path | None,
) -> int:
    """Run it."""
    if role == "front":
        asyncio.run(serve_front(model, channels[0], max(streams)))
    elif role:
        asyncio.run(keep_asleep(model, int(role)))
    if role:
        return 0
    rounds = []
    for channel in channels:
        for number in streams:
            with started(model, channel, streams=number, pass_s=number * stream_pass_us / 1e6) as (front, address):
                for path in paths:
                    read_streams(address, path, streams=number, tokens=20, front=front)  # warm up
                    found = read_streams(address, path, streams=number, tokens=tokens, front=front)
                    cost = {"us_per_token": found["used_s"] / found["tokens"] * 1e6}
                    cost["tokens_per_s"] = found["tokens"] / found["wall_s"]
                    rounds.append({"channel": channel, "streams": number, "path": path, **cost})
    publish("front_cost", table, out, as_json=as_json, rounds=rounds, tokens=tokens)
    return 0


if __name__ == "__main__":
    run_study(main)
