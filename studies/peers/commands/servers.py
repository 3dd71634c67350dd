"""Everyone's server: under the same traffic, and drafting tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from moeflow.cli.options import default_cache_dir
from moeflow.core.errors import ConfigError
from moeflow.planner.hardware.host import host_resources
from moeflow.train.builtin import builtin_source, ensure_builtin_model
from studies.harness.options import out_option
from studies.harness.records import publish
from studies.peers import drafting, model, serving
from studies.peers.commands.options import folder_option, formats_option, say, threads_option
from studies.peers.contestants import FORMATS, SHARED
from studies.peers.drafting_table import drafting_table
from studies.peers.environments import LLAMA, LLAMA_SERVER
from studies.speculation.prompts import Prompt, read_prompts


@click.command("serve", context_settings={"ignore_unknown_options": True})
@folder_option
@formats_option
@threads_option
@click.argument("traffic", nargs=-1, type=click.UNPROCESSED)
def serve(folder: Path, formats: tuple[str, ...], threads: int | None, traffic: tuple[str, ...]) -> None:
    """Send everyone's server the same traffic. Only one server is up at a time: ours or one peer.

    TRAFFIC is handed to `moeflow bench serve`: --rate, --num-requests, --repeats, --out and so on.
    """
    threads = threads or host_resources().num_cores
    for weights in formats or FORMATS:
        peers = list(serving.peer_servers(weights, folder, threads))
        if not peers:
            continue
        for server in (serving.our_server(weights, folder, threads), *peers):
            click.echo(f"{server.name}: {' '.join(server.command)}")
            with serving.running(server, threads, folder / "logs" / f"server-{server.name.replace(' ', '-')}.log"):
                code = serving.send_traffic(server, model.SHAPE["vocab_size"], traffic)
            if code != 0:
                sys.exit(code)


@click.command("speculate")
@folder_option
@click.option("--format", "weights", type=click.Choice(tuple(SHARED)), default="int8", show_default=True)
@threads_option
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Answers of everyone to a prompt.")
@click.option("--per-set", type=click.IntRange(1), default=3, show_default=True, help="Prompts of each set.")
@click.option("--new-tokens", type=click.IntRange(2), default=64, show_default=True, help="Of an answer at most.")
@out_option
def speculate(
    folder: Path, weights: str, threads: int | None, rounds: int, per_set: int, new_tokens: int, out: Path | None
) -> None:
    """Compare drafted tokens with those of llama.cpp's server, on the built-in model and its dense source.

    Needs llama.cpp's server (`setup --peer llama --peer llama-server`); some four minutes on two cores.
    """
    if not LLAMA_SERVER.program(folder).exists():
        raise ConfigError(f"{LLAMA_SERVER.program(folder)} is not there; build it with `setup --peer llama-server`")
    threads = threads or host_resources().num_cores
    builtin, draft = ensure_builtin_model(default_cache_dir()), builtin_source()
    target = drafting.write_target(folder, builtin, draft, SHARED[weights])
    by_set: dict[str, list[Prompt]] = {}
    for prompt in read_prompts(None, str(builtin)):
        by_set.setdefault(prompt.name, []).append(prompt)
    prompts = [prompt for found in by_set.values() for prompt in found[:per_set]]
    fields = drafting.compare(
        drafting.Pair(target, draft),
        prompts,
        folder,
        rounds=rounds,
        new_tokens=new_tokens,
        threads=threads,
        say=say,
    )
    publish(
        "speculation_peers",
        drafting_table,
        out,
        threads=threads,
        format=weights,
        peer_versions={LLAMA.package: LLAMA_SERVER.version(folder)},
        **fields,
    )
