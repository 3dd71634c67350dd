"""Does everyone compute the same function? Log-probabilities of the likeliest tokens, against float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from moeflow.bench.tables import Table
from studies.peers.contestants import Contestant, peer
from studies.peers.processes import EngineProcess

PROMPT = [17, 900, 31999, 5, 5, 12345, 777, 2048]
COUNT = 20  # as many as every engine tells


def compare(
    contestants: Sequence[Contestant], folder: Path, *, threads: int, logs: Path, say: Callable[[str], None]
) -> Table:
    """Return each engine's error, with transformers in float32 as the reference.

    Raises: EngineError if an engine fails.
    """

    def logprobs(contestant: Contestant, count: int) -> list[tuple[int, float]]:
        say(contestant.name)
        with EngineProcess(contestant, threads=threads, seed=0, log=logs / "check.log") as process:
            reply: list[tuple[int, float]] = process.ask("logprobs", prompt=PROMPT, count=count)["logprobs"]
            return reply

    reference = peer("transformers", "float32", folder)
    assert reference is not None
    truth = dict(logprobs(reference, 10**6))
    rows = []
    for contestant in contestants:
        found = logprobs(contestant, COUNT)
        error, is_same_choice = deviation(found, truth)
        rows.append((contestant.name, f"{error:.4f}", "the same" if is_same_choice else "another"))
    title = f"Log-probabilities of the {COUNT} likeliest tokens after {len(PROMPT)}, against {reference.name}"
    return Table(title, ("", "root mean square error", "likeliest token"), tuple(rows))


def deviation(found: Sequence[tuple[int, float]], truth: dict[int, float]) -> tuple[float, bool]:
    """Return the root mean square error, and whether the likeliest token is the same."""
    squares = [(logprob - truth[token]) ** 2 for token, logprob in found]
    return math.sqrt(sum(squares) / len(squares)), found[0][0] == max(truth, key=truth.__getitem__)
