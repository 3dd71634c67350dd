"""Claim: where replicas share experts and routing is skewed, several micro-batches in flight leave less time idle.

Two engines as those of `moeflow serve --replicas 2 --expert-parallel`, each a process with one thread on a core of its
own, generate for as many requests at once. Routers of a random model prefer hot experts, the first and the last of
layers in turn, by a bias. Micro-batches: one, a fixed number, or as many as the engine finds to be best. An engine
waits while none of its micro-batches computes, when its service may; it idles while its process has no processor time.

    python -m studies.replicas_in_flight
    python -m studies.replicas_in_flight --bias 0 --requests 4
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moeflow.bench.tables import Table
from moeflow.cli.bench.output import show
from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.in_flight_choice import InFlightChoice
from moeflow.models.layers.moe import MoE
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from studies.harness.children import Children
from studies.harness.command import run_study
from studies.harness.interleaved import measure_interleaved

NUM_REPLICAS: Final = 2
CHOSEN: Final = 0  # micro-batches: as many as the engine finds to be best
choose = InFlightChoice.choose


def write_model(folder: Path) -> None:
    """Write a random model whose experts take most of a pass."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def bias_routers(engine: Engine, bias: float) -> None:
    """Have routers prefer a quarter of the experts, the first and the last of layers alternately."""
    layers: Any = engine._runner.model.layers  # type: ignore[attr-defined]
    for number, layer in enumerate(layers):
        block: MoE = layer.mlp
        added = torch.zeros(block.config.routing.num_experts)
        hot = block.config.routing.num_experts // 4
        added[slice(hot) if number % 2 == 0 else slice(-hot, None)] = bias
        block.choose = lambda logits, inner=block.choose, added=added: inner(logits + added)  # type: ignore[misc]


def work(model: str, folder: str, replica: int, bias: float) -> None:
    """Be a replica: a line of standard input brings the micro-batches, the requests and the tokens of each."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[replica % os.cpu_count()]})  # type: ignore[operator]
    settings = Settings(
        model=model,
        num_threads=1,
        kv_cache_bytes=2**28,
        max_num_seqs=256,
        prefix_caching=False,
        num_replicas=NUM_REPLICAS,
        expert_parallel=True,
        is_served=True,
        cache_dir=Path(folder),
    )
    config = resolve(settings).config
    assert config.expert_parallel is not None
    own = dataclasses.replace(config.expert_parallel, replica=replica, folder=folder)
    engine = Engine.load(dataclasses.replace(config, expert_parallel=own))
    bias_routers(engine, bias)
    print("true", flush=True)
    while engine.stats().num_peers < NUM_REPLICAS - 1:
        time.sleep(0.01)
    for line in sys.stdin:
        print(json.dumps(run(engine, replica, *json.loads(line))), flush=True)
    engine.close()


def run(engine: Engine, replica: int, number: int, num_requests: int, num_tokens: int) -> tuple[float, float, float]:
    """Generate; return the seconds it took, and of these, how long the engine waited and its process idled."""
    fixed: Any = choose if number == CHOSEN else lambda self, tokens, sequences, most: min(number, most)
    InFlightChoice.choose = fixed  # type: ignore[method-assign]
    before_s, start_cpu_s, start_s = engine.stats().peer_wait_s_total, time.process_time(), time.perf_counter()
    for each in range(num_requests):
        prompt = [(replica * 331 + each * 17 + place * 7) % 1000 for place in range(8)]
        engine.submit(Submission(f"{each}", prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True), seed=each))
    while engine.has_work:
        engine.step()
    seconds, busy_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return seconds, engine.stats().peer_wait_s_total - before_s, seconds - busy_s


def start(model: Path, folder: Path, bias: float) -> Children:
    """Start the replicas; the first writes the packed weights that the other maps."""
    found = Children()
    for replica in range(NUM_REPLICAS):
        arguments = [str(model), str(folder), str(replica), str(bias)]
        found.start([sys.executable, "-m", "studies.replicas_in_flight", "--replica", *arguments])
        found.answer(replica)
    return found


@click.command(context_settings={"show_default": True})
@click.option("--bias", type=float, multiple=True, default=(0.0, 1.0), help="Of routers for hot experts.")
@click.option("--requests", type=click.IntRange(1), multiple=True, default=(4, 64), help="Of a replica, at once.")
@click.option("--tokens", type=click.IntRange(1), default=48, help="Of each answer.")
@click.option("--micro-batches", type=click.IntRange(0), multiple=True, default=(1, 2, 4, 0), help="0: as chosen.")
@click.option("--repeats", type=click.IntRange(1), default=3)
def main(
    bias: tuple[float, ...], requests: tuple[int, ...], tokens: int, micro_batches: tuple[int, ...], repeats: int
) -> None:
    """Generate with each number of micro-batches, one after another."""
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as place:
        write_model(Path(place) / "model")
        for skew in bias:
            folder = Path(place) / f"bias {skew:g}"
            folder.mkdir()
            with start(Path(place) / "model", folder, skew) as replicas:
                for number in requests:
                    rows += measure(replicas, skew, number, tokens, micro_batches, repeats)
    heads = ("routers' bias", "requests", "micro-batches", "wall", "tokens/s", "waited", "idle", "idle share")
    show(Table("2 replicas that share experts, a core each", heads, tuple(rows), ()))


def measure(
    replicas: Children,
    bias: float,
    num_requests: int,
    num_tokens: int,
    micro_batches: tuple[int, ...],
    repeats: int,
) -> list[tuple[str, ...]]:
    """Return a line of the table for each number of micro-batches; the first run of each warms up."""
    arms = {number: partial(replicas.ask, (number, num_requests, num_tokens)) for number in micro_batches}
    runs = measure_interleaved(arms, repeats)
    rows: list[tuple[str, ...]] = []
    for number, found in runs.items():
        walls = [max(seconds for seconds, _, _ in each) for each in found]
        wall = statistics.median(walls)
        waited, idle = (
            [statistics.median(each[replica][what] for each in found) for replica in range(NUM_REPLICAS)]
            for what in (1, 2)
        )
        rows.append(
            (
                f"{bias:g}",
                f"{num_requests}",
                "chosen" if number == CHOSEN else f"{number}",
                f"{wall:.2f} s ({min(walls):.2f} to {max(walls):.2f})",
                f"{NUM_REPLICAS * num_requests * num_tokens / wall:.0f}",
                " ".join(f"{it:.2f} s" for it in waited),
                " ".join(f"{it:.2f} s" for it in idle),
                f"{statistics.mean(idle) / wall:.0%}",
            )
        )
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replica"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    else:
        run_study(main)
