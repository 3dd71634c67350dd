"""Claim: our expert layer is faster than both of transformers' fast ones, for one token as for two thousand.

The layer of the 1.3-billion Qwen3-MoE that the peers are measured with: 32 experts of 768 units over 1024 dimensions,
4 a token, chosen at random. All run in this process, on the same weights, inputs and choices, alternately: ours,
`grouped_mm`, `batched_mm`, ours, ... A row is the whole layer from router outputs to combined output. Every call
gets the next of several layers, as in a model, so that no layer's weights wait in the cache.

    python -m studies.fused_experts --out docs/studies/results/fused_experts.jsonl
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moeflow.bench.records import Record
from moeflow.bench.tables import Table, spread_text
from moeflow.cli.bench.output import result_options
from moeflow.core.errors import ConfigError
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts
from moeflow.kernels.weight_format import WeightFormat
from moeflow.planner.hardware.host import host_resources
from studies.harness.command import run_study
from studies.harness.interleaved import interleaved
from studies.harness.records import publish

NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 32, 1024, 768, 4
NUM_LAYERS = 4  # in float32 300 MB each, and as much for our form of it
TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 127, 128, 256, 257, 512, 1000, 1024, 2048)
OURS, GROUPED, BATCHED = "moeflow", "grouped_mm", "batched_mm"
BATCHED_LIMIT = 64  # it copies every token's experts: 1.2 GB in bfloat16 at 64 tokens
PAUSE_S = 0.01  # before a turn: the threads of the one before spin for a while
DISTURBED = 0.1  # of a core taken by others: such a row is marked
TIME_S = 0.05  # a measurement repeats calls for at least so long
MAX_ERROR: dict[WeightFormat, float] = {
    "float32": 1e-4,
    "bfloat16": 2e-2,
}  # relative, of transformers in bfloat16 beside ours

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """What a router hands to the layer."""

    hidden_states: torch.Tensor  # [T, H]
    topk_ids: torch.Tensor  # [T, K]
    topk_weights: torch.Tensor  # [T, K]

    @classmethod
    def random(cls, num_tokens: int) -> Inputs:
        """Return tokens whose choices are even and independent."""
        chosen = torch.rand(num_tokens, NUM_EXPERTS).topk(TOP_K)
        return cls(torch.randn(num_tokens, HIDDEN), chosen.indices, chosen.values.softmax(-1))


def make_layers(weights: WeightFormat) -> dict[str, list[Layer]]:
    """Return several layers of each implementation, the same random weights in each."""
    dtype = getattr(torch, weights)
    layers: dict[str, list[Layer]] = {OURS: [], GROUPED: [], BATCHED: []}
    for _ in range(NUM_LAYERS):
        gate_up = (torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN) * 0.02).to(dtype)
        down = (torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) * 0.02).to(dtype)
        packed = PackedExperts.pack(gate_up, down, weights)
        layers[OURS].append(our_layer(packed))
        for name in (GROUPED, BATCHED):
            layers[name].append(transformers_layer(name, gate_up, down))
    return layers


def our_layer(packed: PackedExperts) -> Layer:
    """Return our layer; its activations are float32 whatever the weights are."""

    def run(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        return packed.compute(x, topk_ids, topk_weights)

    return run


def transformers_layer(implementation: str, gate_up: torch.Tensor, down: torch.Tensor) -> Layer:
    """Return transformers' layer on these weights, activations in their type as its models have them."""
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, num_experts=NUM_EXPERTS, moe_intermediate_size=WIDTH, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
    layer: Layer = experts.eval()
    return layer


def measure(layers: dict[str, list[Layer]], num_tokens: int, weights: str, repeats: int) -> dict[str, Any]:
    """Return the microseconds of a call, alternating between implementations; the first turn is a warm-up."""
    inputs = Inputs.random(num_tokens)
    arguments = {name: cast(inputs, "float32" if name == OURS else weights) for name in layers}
    names = [name for name in layers if name != BATCHED or num_tokens <= BATCHED_LIMIT]
    turns = {name: itertools.cycle(layers[name]) for name in names}
    check_equal({name: layers[name][0](*arguments[name]).float() for name in names}, weights)
    times: dict[str, list[float]] = {name: [] for name in names}
    calls = dict.fromkeys(names, NUM_LAYERS)
    foreign_before, began = foreign_cpu_s(), time.perf_counter()
    for repeat, name in interleaved(names, repeats + 1):
        time.sleep(PAUSE_S)
        start = time.perf_counter()
        for layer in itertools.islice(turns[name], calls[name]):
            layer(*arguments[name])
        seconds = (time.perf_counter() - start) / calls[name]
        if repeat:
            times[name].append(seconds * 1e6)
        else:
            calls[name] = max(round(TIME_S / seconds), 1)
    foreign = (foreign_cpu_s() - foreign_before) / (time.perf_counter() - began)
    return {"num_tokens": num_tokens, "microseconds": times, "foreign_cpu": round(max(foreign, 0.0), 3)}


def foreign_cpu_s() -> float:
    """Return the processor seconds that other processes have taken, time stolen by the host included."""
    all_of_it, own = psutil.cpu_times(), psutil.Process().cpu_times()
    idle = all_of_it.idle + getattr(all_of_it, "iowait", 0.0)
    return float(sum(all_of_it) - idle - own.user - own.system)


def cast(inputs: Inputs, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a layer's arguments with floats in that type."""
    wanted = getattr(torch, dtype)
    return inputs.hidden_states.to(wanted), inputs.topk_ids, inputs.topk_weights.to(wanted)


def check_equal(outputs: dict[str, torch.Tensor], weights: str) -> None:
    """Refuse to compare the speed of different functions."""
    expected = outputs[GROUPED]
    for name, output in outputs.items():
        error = ((output - expected).norm() / expected.norm()).item()
        if error > MAX_ERROR[weights]:
            raise ConfigError(f"{name} differs from {GROUPED} by {error:.1e} of its norm")


def table(record: Record) -> Table:
    """Return a row for every token count; ratios are of turns."""
    rows = []
    for row in record["rows"]:
        times = row["microseconds"]
        cells = [spread_text(times[name], 0) if name in times else "" for name in (OURS, GROUPED, BATCHED)]
        best = min((name for name in times if name != OURS), key=lambda name: statistics.median(times[name]))
        ratios = [theirs / ours for ours, theirs in zip(times[OURS], times[best], strict=True)]
        mark = " !" if row["foreign_cpu"] > DISTURBED else ""
        rows.append((str(row["num_tokens"]), *cells, spread_text(ratios, 2), f"{row['foreign_cpu']:.2f}{mark}"))
    title = f"Expert layer alone, weights in {record['format']}, microseconds a call: median (min-max)"
    notes = (
        f"Times as fast: the better of transformers' two by ours. {BATCHED} copies each token's experts and is left "
        f"out beyond {BATCHED_LIMIT} tokens.",
        f"!: other processes took more than {DISTURBED} of a core; do not trust the row.",
        f"Our kernels: {record['instruction_set']}.",
    )
    return Table(title, ("tokens", OURS, GROUPED, BATCHED, "times as fast", "others' CPU"), tuple(rows), notes)


@click.command()
@click.option("--format", "formats", type=click.Choice(tuple(MAX_ERROR)), multiple=True, help="Default: both.")
@click.option("--tokens", type=click.IntRange(1), multiple=True, help="Only so many; default: 1 to 2048.")
@click.option("--threads", type=click.IntRange(1), help="Default: one a core.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Turns.")
@click.option("--seed", type=int, default=0, show_default=True)
@result_options
def main(
    formats: tuple[WeightFormat, ...],
    tokens: tuple[int, ...],
    threads: int | None,
    repeats: int,
    seed: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure the expert layer alone against transformers'."""
    if not extension.is_available():
        raise click.ClickException(extension.why_not())
    threads = threads or host_resources().num_cores
    torch.set_num_threads(threads)
    extension.set_num_threads(threads)
    for weights in formats or MAX_ERROR:
        torch.manual_seed(seed)
        layers = make_layers(weights)
        with torch.inference_mode():
            rows = [measure(layers, num_tokens, weights, repeats) for num_tokens in tokens or TOKENS]
        publish(
            "fused_experts",
            table,
            out,
            as_json=as_json,
            seed=seed,
            threads=threads,
            format=weights,
            instruction_set=extension.isa_name(),
            rows=rows,
        )


if __name__ == "__main__":
    run_study(main)
