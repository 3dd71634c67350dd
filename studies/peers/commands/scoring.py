"""Perplexity of everyone on the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from moeflow.cli.bench.output import show as show_table
from moeflow.cli.options import default_cache_dir
from moeflow.planner.hardware.host import host_resources
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.builtin import builtin_source, ensure_builtin_model
from moeflow.train.calibration_text import calibration_text
from moeflow.train.perplexity import WINDOW, windows
from studies.harness.options import out_option
from studies.harness.records import recorder
from studies.peers import model, scoring, widened
from studies.peers.commands.options import folder_option, isa_option, peer_versions, say, threads_option
from studies.peers.contestants import GGUF_PEERS, LLAMA_NAMES, Contestant, exact, gguf_peer, ours_of_file
from studies.peers.quantizer import FILE_TYPES, quantize
from studies.peers.scores_table import scores_table

WIDENED, RANDOM = MODELS = ("widened", "random")
_FILES = {WIDENED: "widened-{}.gguf", RANDOM: model.FILE}


@click.command()
@folder_option
@click.option("--model", "name", type=click.Choice(MODELS), default=WIDENED, show_default=True)
@click.option("--format", "formats", type=click.Choice(tuple(LLAMA_NAMES)), multiple=True, help="Default: all.")
@click.option("--peer", "peers", type=click.Choice(GGUF_PEERS), multiple=True, default=("llama",), show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=8192, show_default=True, help="Of text.")
@click.option("--exact/--no-exact", "is_exact", default=True, help="Compare with transformers in float32, too.")
@threads_option
@isa_option
@out_option
def perplexity(
    folder: Path,
    name: str,
    formats: tuple[str, ...],
    peers: tuple[str, ...],
    threads: int | None,
    isa: str,
    out: Path | None,
    **asked: Any,
) -> None:
    """Compare the perplexity of the same file in everyone, on the calibration text.

    The model is the built-in one, its rows widened by zeros to what K-quants need; or the random one, of which only
    the likeliest tokens say anything. Needs llama.cpp for its quantizer. ik_llama.cpp is left out unless asked for: its
    version 0.1.5 gives noise for a Mixtral in a GGUF file, the widened model's architecture.
    """
    threads = threads or host_resources().num_cores
    folder.mkdir(parents=True, exist_ok=True)
    kept = recorder("peer_scores", out)
    for weights in formats or LLAMA_NAMES:
        file = _file(name, LLAMA_NAMES[weights], folder)
        texts = _texts(file, max(asked["tokens"] // WINDOW, 1))
        mine = ours_of_file(weights, file, isa)
        others = [gguf_peer(peer, file, LLAMA_NAMES[weights], folder, isa) for peer in peers]

        def score(contestant: Contestant, texts: list[list[int]] = texts) -> scoring.Score:
            return scoring.score(contestant, texts, threads=threads, logs=folder / "logs", say=say)

        own = score(mine)
        compared = [scoring.compare(other.name, own, score(other)) for other in others]
        if asked["is_exact"]:
            with scoring.exact_folder(file, folder) as place:
                reference = exact(place)
                compared.append(scoring.compare(reference.name, own, score(reference)))
        versions = {name: it for other in others for name, it in peer_versions(other, folder).items()}
        fields = {
            "model": name,
            "format": weights,
            "isa": isa,
            "window": WINDOW,
            "num_tokens": len(own.logprobs),
            "perplexity": own.perplexity,
            "others": compared,
            "peer_versions": versions,
        }
        kept.add(fields, seed=0, threads=threads)
    show_table(scores_table(kept.records))


def _file(name: str, kind: str, folder: Path) -> Path:
    """Return the file of a model; the widened one's is made if it is not there, the random one's with `model`."""
    file = folder / _FILES[name].format(kind)
    if file.exists() or name == RANDOM:
        return file
    say(f"writing {file}")
    source = folder / widened.FOLDER
    if not source.exists():
        widened.widen(ensure_builtin_model(default_cache_dir()), source)
    if kind in FILE_TYPES:
        quantize(_file(name, "bf16", folder), file, kind, folder)
    else:
        unfinished = file.with_suffix(".unfinished")
        model.write_gguf(source, unfinished, model.QUANTIZATIONS[kind], tokenizer_file=builtin_source())
        unfinished.rename(file)
    return file


def _texts(file: Path, count: int) -> list[list[int]]:
    """Return so many whole windows from all over the calibration text; all of them if there are fewer."""
    text = calibration_text(Tokenizer.load(file).encode)
    joined = [fitting + held_out for fitting, held_out in zip(text.fitting, text.held_out, strict=True)]
    pieces = [list(piece) for token_ids in joined for piece in windows(token_ids, WINDOW) if len(piece) == WINDOW]
    count = min(count, len(pieces))
    return [pieces[index * len(pieces) // count] for index in range(count)]
