"""`moeflow lend`: this machine's memory for the experts of a model that another machine serves."""

from __future__ import annotations

import os
from pathlib import Path

import click

from moeflow.cli import lazy
from moeflow.cli.config_file import config_option
from moeflow.cli.options import cache_dir_option, memory_size, threads_option
from moeflow.core.address import LOOPBACK, parse_address
from moeflow.core.errors import ConfigError
from moeflow.parallel.tcp.cluster_token import default_token_file, ensure_token

EPILOG = """\b
Examples: a model is larger than the memory of a, and b has some to spare:
  b$ moeflow lend --listen b.lan:9300 --memory 16GiB
      waits for heads, and makes a token
  a$ scp b.lan:.cache/moeflow/cluster-token .
  a$ moeflow serve ~/models/mixtral --memory 8GiB \\
         --remote-experts b.lan:9300 --cluster-token-file cluster-token

This machine needs no model: experts come from the machine that serves, and it computes with them where they are, so
that little goes over the network for a token. Answers are those of one machine, to the bit. Both need the same versions
of moeflow and torch, and this one the instruction set that the other uses.

Several may borrow at once, each for its own model, as long as there is room. What one had is free again when it ends,
dies or falls silent. Ctrl-C ends lending; those who borrow go on with their own disks.

Only machines with the token can borrow. All messages are encrypted and authenticated: a listener on the network learns
only addresses, sizes and times."""


@click.command(epilog=EPILOG)
@click.option(
    "--listen",
    "listen",
    metavar="[HOST:]PORT",
    required=True,
    help="This machine's address, and a port. A port alone takes only processes of this machine.",
)
@click.option(
    "--memory", "memory_bytes", metavar="SIZE", required=True, callback=memory_size, help="How much to lend: 16GiB."
)
@click.option(
    "--cluster-token-file",
    "token_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The secret that borrowers have a copy of; made if it is not there.  [default: cluster-token in the cache "
    "folder]",
)
@threads_option
@cache_dir_option
@config_option
def lend(listen: str, memory_bytes: int, token_file: Path | None, num_threads: int | None, cache_dir: Path) -> None:
    """Lend memory for experts of a model that another machine serves, and compute with them."""
    try:
        host, port = parse_address(listen, default_host=LOOPBACK)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from None
    settings = lazy.LendSettings(
        host=host,
        port=port,
        token=ensure_token(token_file or default_token_file(cache_dir)),
        memory_bytes=memory_bytes,
        num_threads=num_threads,
        cpu_isa=os.environ.get("MOEFLOW_CPU_ISA", ""),
    )
    lazy.lend(settings, lambda news: click.echo(news, err=True))
