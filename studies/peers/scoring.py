"""Perplexity of the same file in everyone: does ours lose anything by how it computes?

The reference is transformers in float32 on the very weights of the file, without rounding on the way.
Differences are of the same tokens, so that their standard error is small.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from moeflow.checkpoint.open import open_checkpoint
from studies.peers.contestants import Contestant
from studies.peers.processes import EngineProcess


@dataclass(frozen=True, slots=True)
class Score:
    """What an engine made of the texts."""

    logprobs: list[float]  # of each token but the first of each text
    likeliest: list[int]  # at each of these places

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log-probability."""
        return math.exp(-statistics.fmean(self.logprobs))


def score(
    contestant: Contestant, texts: Sequence[list[int]], *, threads: int, logs: Path, say: Callable[[str], None]
) -> Score:
    """Return what an engine makes of texts. Raises: EngineError if it fails."""
    say(f"{contestant.name}: {sum(map(len, texts))} tokens")
    found = Score([], [])
    with EngineProcess(contestant, threads=threads, seed=0, log=logs / "score.log") as process:
        for text in texts:
            reply = process.ask("text_logprobs", text=text)
            found.logprobs.extend(reply["logprobs"])
            found.likeliest.extend(reply["likeliest"])
    return found


def compare(name: str, ours: Score, other: Score) -> dict[str, Any]:
    """Return the figures of one that ours is compared with."""
    differences = [theirs - own for own, theirs in zip(ours.logprobs, other.logprobs, strict=True)]
    same = [own == theirs for own, theirs in zip(ours.likeliest, other.likeliest, strict=True)]
    return {
        "name": name,
        "perplexity": other.perplexity,
        "ratio": math.exp(statistics.fmean(differences)),  # of perplexities, ours / its
        "std_error": statistics.stdev(differences) / math.sqrt(len(differences)),
        "same_likeliest_share": statistics.fmean(same),
    }


@contextmanager
def exact_folder(file: Path, place: Path) -> Iterator[Path]:
    """Write a file's weights in float32, as transformers reads them, for as long as the block runs."""
    with tempfile.TemporaryDirectory(dir=place) as name, closing(open_checkpoint(file)) as checkpoint:
        folder = Path(name)
        weights = {tensor: checkpoint.read(tensor).float().contiguous() for tensor in checkpoint.tensors}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        del weights
        config = {**checkpoint.config, "dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder
