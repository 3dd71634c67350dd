"""`moeflow join`: this machine computes for a server on another, as a rank or as an engine."""

from __future__ import annotations

import os
from pathlib import Path

import click

from moeflow.cli import lazy
from moeflow.cli.config_file import config_option
from moeflow.cli.options import cache_dir_option, threads_option
from moeflow.cli.params import complete_model
from moeflow.core.address import parse_address
from moeflow.core.errors import ConfigError
from moeflow.parallel.tcp.cluster_token import default_token_file, read_token

EPILOG = """\b
Examples, with two machines, a and b:
  a$ moeflow serve ~/models/olmoe --ranks 2 --listen-ranks a.lan:9200
      waits for one other rank, and makes a token
  b$ scp a.lan:.cache/moeflow/cluster-token .
  b$ moeflow join a.lan:9200 --cluster-token-file cluster-token
\b
  b$ moeflow join a.lan:9200 /data/olmoe
      where the model lies elsewhere, and the token in the cache folder
\b
  a$ moeflow serve ~/models/olmoe --replicas 2 --listen-ranks a.lan:9200
  b$ moeflow join a.lan:9200
  c$ moeflow join a.lan:9200
      two machines with a whole engine each

Each rank has a part of the model, which may be larger than one machine's memory; answers are those of one machine, to
the bit. The machines need the same versions of moeflow and torch, the same checkpoint, and processors with the
instruction set that the first one uses. Ranks must be able to connect to each other.

When the server stops or its engine restarts, this waits and joins again. Ctrl-C or SIGTERM ends it with exit code 0.
The engine of a rank then restarts, and continues all requests once another machine is in its place. Other engines
continue the requests of a whole engine; without another, it finishes them here first. A second signal ends it at once.

Only machines with the token can join. All messages are encrypted and authenticated: a listener on the network learns
only addresses, sizes and times."""


@click.command(epilog=EPILOG)
@click.argument("address", metavar="HOST:PORT")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option(
    "--cluster-token-file",
    "token_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A copy of the server's token.  [default: cluster-token in the cache folder]",
)
@threads_option
@cache_dir_option
@config_option
def join(address: str, model: str | None, token_file: Path | None, num_threads: int | None, cache_dir: Path) -> None:
    """Compute for a server on another machine: the rank or the engine that it needs next.

    HOST:PORT is the server's --listen-ranks. MODEL is this machine's copy of the checkpoint. Without it, this machine
    uses the server's path or its own cache. It pulls a model that the server has pulled.
    """
    try:
        host, port = parse_address(address)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="HOST:PORT") from None
    settings = lazy.JoinSettings(
        host=host,
        port=port,
        token=read_token(token_file or default_token_file(cache_dir)),
        model=None if model is None else str(Path(lazy.local_path(model)).absolute()),
        num_threads=num_threads,
        cpu_isa=os.environ.get("MOEFLOW_CPU_ISA", ""),
        cache_dir=cache_dir,
    )
    try:
        lazy.keep_engines(settings, _say)
    except lazy.LeftError as left:
        _say(str(left))


def _say(news: str) -> None:
    click.echo(news, err=True)
