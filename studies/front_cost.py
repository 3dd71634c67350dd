"""Processor time that a server's HTTP processes take for a streamed token, before engines that sleep.

    python -m studies.front_cost MODEL --out FILE

MODEL is a folder with a tokenizer. The engine is a process of this machine (`ipc`), or kept by another process over
ZeroMQ with CURVE (`curve`). With several fronts, the server relays tokens between them and the engine.
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

from moeflow.cli.bench.output import result_options
from moeflow.core.errors import EngineError
from moeflow.engine.generator import Generator
from moeflow.processes.nodes import keeper
from moeflow.processes.nodes.engine_places import EnginePlaces
from moeflow.processes.nodes.join_settings import JoinSettings
from moeflow.processes.process_client import ProcessEngine
from moeflow.processes.restart_limits import RestartLimits
from moeflow.processes.supervisor import Supervisor
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.fronts.fronted_server import FrontedServer
from moeflow.server.fronts.fronts import Fronts
from moeflow.server.http_server import HttpServer
from moeflow.server.listener import listen, url
from moeflow.server.model_pool import ModelPool
from moeflow.server.open_connections import MAX_CONNECTIONS
from moeflow.text.tokenizer import Tokenizer
from studies.front_cost_table import table
from studies.harness.command import run_study
from studies.harness.records import publish
from studies.sleeping_engine import PASS_S, SleepingHost, sleeping_config

CHANNELS = ("ipc", "curve")
FRONT = "moeflow.server.fronts.main"
TOKEN = b"0123456789abcdef0123456789abcdef"
PROMPT = "The quick brown fox jumps over the lazy dog, and all of the others sleep in the warm sun of the afternoon. "


async def serve(model: str, channel: str, max_num_seqs: int, num_fronts: int) -> None:
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
    settings = ServerConfig(port=0, max_queue=1024, num_fronts=num_fronts)
    generator = Generator(client, Tokenizer.load(model))
    listener = listen(settings)
    if num_fronts == 1:
        http = HttpServer(create_app(None, settings))
    else:
        fronts = Fronts(num_fronts, model)
        pool = ModelPool(max_queue=settings.max_queue, occupancy=fronts.occupancy)
        http = FrontedServer(create_app(None, settings, pool=pool), fronts, max_connections=MAX_CONNECTIONS)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    await asyncio.sleep(0)
    await http.attach(generator)
    print(url(listener), flush=True)
    await serving


async def keep_asleep(model: str, port: int) -> None:
    """Keep a sleeping engine for a front until this process is ended."""
    keeper.LocalHost = SleepingHost  # type: ignore[misc]
    keeper.checked_config = lambda config, *_: config  # there is no checkpoint
    await keeper.Keeper(JoinSettings(host="127.0.0.1", port=port, token=TOKEN, model=model), print).run()


@contextlib.contextmanager
def started(
    model: str, channel: str, *, streams: int, pass_s: float, num_fronts: int
) -> Iterator[tuple[psutil.Process, str]]:
    """Run a server, and yield its process and address."""
    environment = {**os.environ, PASS_S: str(pass_s)}
    me = [sys.executable, "-m", "studies.front_cost", model, "--streams", str(streams), "--channel", channel]
    me += ["--fronts", str(num_fronts)]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))

        def start(*role: str) -> subprocess.Popen[str]:
            process = subprocess.Popen([*me, *role], stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
            stack.callback(process.wait, 30)
            stack.callback(process.kill)  # with all its children
            return process

        server = start("--as", "server")
        assert server.stdout is not None
        if channel == "curve":
            start("--as", server.stdout.readline().strip())
        if not (address := server.stdout.readline().strip()):
            log.seek(0)
            raise EngineError(f"the server has not started: {log.read()[-2000:]}")
        yield psutil.Process(server.pid), address


def used_s(server: psutil.Process) -> dict[str, float]:
    """Return the processor time of a server's process, and of its fronts if it has several."""
    fronts = [child for child in server.children() if FRONT in child.cmdline()]
    times = {"server": [server.cpu_times()], "fronts": [front.cpu_times() for front in fronts]}
    return {name: sum(it.user + it.system for it in found) for name, found in times.items()}


def read_streams(address: str, path: str, *, streams: int, tokens: int, server: psutil.Process) -> dict[str, float]:
    """Read so many streams at once; return the processor time of a token in microseconds, and tokens a second."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    body: dict[str, Any] = {"max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    selector = selectors.DefaultSelector()
    begun_s, begun = time.monotonic(), used_s(server)
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
    ended, wall_s = used_s(server), time.monotonic() - begun_s
    if num_events < 0.8 * streams * tokens:  # special tokens have none
        raise EngineError(f"{num_events} events instead of {streams * tokens}")
    cost = {f"{name}_us": (ended[name] - begun[name]) / (streams * tokens) * 1e6 for name in ended}
    return cost | {"tokens_per_s": streams * tokens / wall_s}


@click.command(help=__doc__)
@click.argument("model")
@click.option("--streams", default=(64, 256), show_default=True, multiple=True, help="At once.")
@click.option("--tokens", default=300, show_default=True, help="Of each stream.")
@click.option("--channel", "channels", type=click.Choice(CHANNELS), default=CHANNELS, multiple=True)
@click.option("--path", "paths", default=("/v1/completions",), show_default=True, multiple=True)
@click.option("--stream-pass-us", default=400.0, show_default=True, help="Of a pass, for each stream.")
@click.option("--fronts", "num_fronts", default=1, show_default=True)
@click.option("--as", "role", default="", hidden=True, help="The server, or the keeper for that port of it.")
@result_options
def main(
    model: str,
    streams: tuple[int, ...],
    tokens: int,
    channels: tuple[str, ...],
    paths: tuple[str, ...],
    stream_pass_us: float,
    num_fronts: int,
    role: str,
    as_json: bool,
    out: Path | None,
) -> int:
    """Run it."""
    if role == "server":
        asyncio.run(serve(model, channels[0], max(streams), num_fronts))
    elif role:
        asyncio.run(keep_asleep(model, int(role)))
    if role:
        return 0
    rounds = []
    for channel in channels:
        for number in streams:
            pass_s = number * stream_pass_us / 1e6
            with started(model, channel, streams=number, pass_s=pass_s, num_fronts=num_fronts) as (server, address):
                for path in paths:
                    read_streams(address, path, streams=number, tokens=20, server=server)  # warm up
                    found = read_streams(address, path, streams=number, tokens=tokens, server=server)
                    rounds.append({"channel": channel, "streams": number, "path": path, **found})
    publish("front_cost", table, out, as_json=as_json, rounds=rounds, tokens=tokens, fronts=num_fronts)
    return 0


if __name__ == "__main__":
    run_study(main)
