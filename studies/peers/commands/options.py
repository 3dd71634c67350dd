"""Options that commands share, and their help texts."""

from __future__ import annotations

from pathlib import Path

import click

from moeflow.bench.records import versions
from studies.harness.needs import ROOT
from studies.peers.contestants import FORMATS, PEERS, Contestant, peer
from studies.peers.environments import ENVIRONMENTS, IK_LLAMA_NATIVE, ISAS, NATIVE, Environment

folder_option = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / ".peers",
    show_default="the checkout's .peers",
    help="Where environments and model lie.",
)
peers_option = click.option(
    "--peer", "peers", type=click.Choice(PEERS), multiple=True, help="Only this one; default: all that are installed."
)
formats_option = click.option(
    "--format", "formats", type=click.Choice(FORMATS), multiple=True, help="Only weights in this format; default: all."
)
threads_option = click.option("--threads", type=click.IntRange(1), help="Threads of each engine; default: one a core.")
isa_option = click.option(
    "--isa",
    type=click.Choice(ISAS),
    default=NATIVE,
    show_default=True,
    help="avx2: everyone as on a machine without AVX-512.",
)


def available(peers: tuple[str, ...], weights: str, folder: Path, isa: str = NATIVE) -> list[Contestant]:
    """Return the peers that have the format: those asked for, or those that are installed."""
    found = [peer(name, weights, folder, isa) for name in peers or PEERS]
    return [each for each in found if each is not None and (peers or each.python.exists())]


def peer_versions(contestant: Contestant, folder: Path) -> dict[str, str | None]:
    """Return what a peer is called where it was installed from, and its version."""
    if contestant.wish.items() >= IK_LLAMA_NATIVE.wish(folder).items():
        return {IK_LLAMA_NATIVE.package: IK_LLAMA_NATIVE.version(folder)}
    for environment in ENVIRONMENTS.values():
        if isinstance(environment, Environment) and contestant.python == environment.python(folder):
            return {environment.package: environment.version(folder)}
    return {"transformers": versions()["transformers"]}


def say(what: str) -> None:
    """Report progress."""
    click.echo(what, err=True)
