"""Claim: choosing tokens costs little beside a pass, whatever a request asks for.

Times `sample` over rows of made-up logits: token number n, after a shuffle, has the likelihood of a word of rank n in
Zipf's law with exponent 1.3, so that 90% of the mass lie on about a thousand tokens. Prints the median of all calls.

    python -m studies.sampling --vocab-size 49152
"""

from __future__ import annotations

import statistics

import click
import torch

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import show
from moeflow.core.batch import BatchEntry
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.verification import verify
from moeflow.kernels.cpu import extension
from studies.harness.command import run_study
from studies.harness.interleaved import seconds

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 40": {"top_k": 40},
    "temperature, penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "greedy, logprobs 5": {"temperature": 0.0, "logprobs": 5},
}


def make_requests(count: int, params: dict[str, float]) -> list[Request]:
    """Make requests with 100 tokens of prompt and of output."""
    return [
        Request("r", list(range(100)), SamplingParams(**params), 999, frozenset(), seed, list(range(50, 150)))
        for seed in range(count)
    ]


def microseconds(logits: torch.Tensor, requests: list[Request], calls: int) -> float:
    """Return the median time of a call, for the whole batch."""
    entries = [BatchEntry(request, 0, 1, (0,), samples=True) for request in requests]
    return statistics.median(seconds(lambda: verify(logits, entries)) for _ in range(calls)) * 1e6


@click.command(help=__doc__)
@click.option("--vocab-size", default=49152, show_default=True)
@click.option("--num-threads", default=2, show_default=True, help="Of the pool.")
@click.option("--torch-threads", default=1, show_default=True, help="Of torch; the engine sets 1.")
@click.option("--calls", default=30, show_default=True, help="Of each kind and size.")
def main(vocab_size: int, num_threads: int, torch_threads: int, calls: int) -> None:
    """Measure and print."""
    torch.set_num_threads(torch_threads)
    extension.set_num_threads(num_threads)
    rows = []
    ranks = torch.stack([torch.randperm(vocab_size) for _ in range(32)])
    logits = 10.0 - 1.3 * (ranks + 1).log()
    for kind, params in KINDS.items():
        results = [microseconds(logits[:count], make_requests(count, params), calls) for count in (1, 8, 32)]
        rows.append((kind, *(f"{result:.0f}" for result in results)))
    show(Table("Microseconds a pass", ("", *(f"{count} rows" for count in (1, 8, 32))), tuple(rows)))


if __name__ == "__main__":
    run_study(main)
