"""From process start to first token, of programs that start anew every time."""

from __future__ import annotations

from pathlib import Path

import click

from moeflow.cli.bench.output import show as show_table
from moeflow.cli.options import default_cache_dir
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.hardware.host import host_resources
from moeflow.train.builtin import builtin_source, ensure_builtin_model
from studies.harness.options import out_option
from studies.harness.records import recorder
from studies.peers import drafting, starting
from studies.peers.commands.options import folder_option, say, threads_option
from studies.peers.contestants import GGUF_PEERS, LLAMA_NAMES, convert, gguf_peer, ours
from studies.peers.model import FILE
from studies.peers.starts_table import starts_table
from studies.peers.turns import read_all

BUILTIN, RANDOM = MODELS = ("builtin", "random")
_BUILTIN_PACKED = "builtin-bfloat16.slabs"


@click.command()
@folder_option
@click.option("--model", "names", type=click.Choice(MODELS), multiple=True, help="Only this one; default: both.")
@click.option(
    "--format", "weights", type=click.Choice(tuple(LLAMA_NAMES)), default="int8", show_default=True, help="Of random."
)
@threads_option
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Starts of everyone.")
@out_option
def start(
    folder: Path, names: tuple[str, ...], weights: str, threads: int | None, rounds: int, out: Path | None
) -> None:
    """Measure from process start to first token: `moeflow generate` on a packed file, and the peers, alternately."""
    threads = threads or host_resources().num_cores
    folder.mkdir(parents=True, exist_ok=True)
    kept = recorder("peer_starts", out)
    for name in names or MODELS:
        kind = weights if name == RANDOM else "bfloat16"
        program, file = _random(folder, weights) if name == RANDOM else _builtin(folder)
        found = [gguf_peer(peer, file, LLAMA_NAMES[kind], folder) for peer in GGUF_PEERS]
        peers = [each for each in found if each.python.exists()]
        for path in (file, program.packed, program.model):
            read_all(path)
        logs = folder / "logs"
        seconds = starting.measure(program, peers, rounds=rounds, threads=threads, logs=logs, say=say)
        fields = {
            "model": name,
            "format": kind,
            "seconds": seconds,
        }
        kept.add(fields, seed=0, threads=threads)
    show_table(starts_table(kept.records))


def _random(folder: Path, weights: str) -> tuple[starting.Program, Path]:
    contestant = ours(weights, folder)
    convert(contestant)
    assert contestant.packed is not None
    options = ("--dtype", "bfloat16") if contestant.model.is_dir() else ()
    return starting.Program(contestant.model, contestant.packed, options), folder / FILE.format(LLAMA_NAMES[weights])


def _builtin(folder: Path) -> tuple[starting.Program, Path]:
    model, packed = ensure_builtin_model(default_cache_dir()), folder / _BUILTIN_PACKED
    pack(str(model), packed, cache_dir=None, dtype="bfloat16")
    file = drafting.write_target(folder, model, builtin_source(), "bf16")
    return starting.Program(model, packed, ("--dtype", "bfloat16")), file
