"""Claim: a model whose experts are in the slots of a cache, all of them, decodes as fast as one that knows no cache.

The same model twice in one process: resident, and over slots. Both answer the same prompts and alternate step by step;
each is first in every other turn. So any other load hits both alike. Their tokens must agree. The ratio is the median
over pairs of neighbouring steps. With fewer slots than experts the rest comes from disk.

    python -m studies.expert_cache_overhead --slots 100 --slots 50 --batch 1 --batch 8
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.cli.options import default_cache_dir
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig
from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.experts.cache.policies import DEFAULT_POLICY, POLICIES
from moeflow.experts.predict.registry import DEFAULT_PREDICTOR, NO_PREDICTOR, PREDICTORS
from moeflow.planner.choices.packed_files import pack
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.builtin import ensure_builtin_model
from moeflow.train.calibration_text import calibration_text
from studies.harness.command import run_study
from studies.harness.records import publish

PROMPT_TOKENS = 200


def resident_config(model: str, quantize: str | None, num_threads: int | None) -> EngineConfig:
    """Return the model with weights in memory of its own: mapped from a file they would have other pages."""
    settings = Settings(model=model, quantize=quantize, num_threads=num_threads, kv_cache_bytes=2**27)
    return dataclasses.replace(resolve(settings).config, packed_file="")


def over_slots(config: EngineConfig, quantize: str | None, percent: int, policy: str, predictor: str) -> EngineConfig:
    """Return the same over slots for so many of its experts."""
    cache_dir = default_cache_dir()
    index = pack(config.model_path, None, cache_dir=cache_dir, quantize=quantize)
    slots = ExpertSlotsConfig(
        packed_weights_file=str(index.path),
        num_slots=max(index.spec.num_slabs * percent // 100, 1),
        slab_bytes=index.spec.slab_bytes,
        policy=policy,
        predictor=predictor,
    )
    return dataclasses.replace(config, experts=slots)


def prompts_of(model: str) -> list[list[int]]:
    """Cut a piece out of each of several texts; every batch alternates between the texts."""
    texts = calibration_text(Tokenizer.load(model).encode).fitting
    pieces = range(0, min(map(len, texts)) - PROMPT_TOKENS, PROMPT_TOKENS)
    return [text[start : start + PROMPT_TOKENS] for start in pieces for text in texts]


class Answers:
    """An engine at work on several prompts."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Compute the prompts: each next step brings a token of every answer."""
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            engine.submit(Submission(f"{number}", list(prompt), sampling, seed=0))
        while len(self.tokens) < len(prompts):
            self.step()

    @property
    def longest(self) -> int:
        """Tokens of the longest answer so far."""
        return max(map(len, self.tokens.values()))

    def step(self) -> float:
        """Run a step and return how long it took, in seconds."""
        start = time.perf_counter()
        outputs = self.engine.step()
        elapsed_s = time.perf_counter() - start
        for output in outputs:
            if output.token_ids:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return elapsed_s

    def finish(self) -> dict[str, list[int]]:
        """Run the remaining steps and return all tokens."""
        while self.engine.has_work:
            self.step()
        return self.tokens


def compare(resident: Engine, cached: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
    """Return what both took. Raises: AssertionError if tokens differ."""
    answers = [Answers(engine, prompts, num_tokens) for engine in (resident, cached)]
    before = cached.stats()
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(num_tokens - max(each.longest for each in answers)):  # before the first answer ends
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(answers[which].step())
    now = cached.stats()
    assert answers[0].finish() == answers[1].finish(), "the cache has changed an answer"
    plain, ours = times
    hits, late, misses, stall_s = (
        getattr(now, f"expert_{name}_total") - getattr(before, f"expert_{name}_total")
        for name in ("hits", "late", "misses", "stall_s")
    )
    return {
        "num_slots": now.expert_slots,
        "num_experts": now.experts_on_disk,
        "batch_size": len(prompts),
        "resident_s": plain,
        "slots_s": ours,
        "stall_s": stall_s,
        "hit_rate": hits / (hits + late + misses),
    }


@click.command()
@click.option("--model", type=click.Path(exists=True), help="A folder; the built-in model by default.")
@click.option("--quantize", type=click.Choice(["int8", "int4"]))
@click.option("--slots", "percents", type=int, multiple=True, default=(100,), help="Percent of the experts.")
@click.option("--batch", "batches", type=int, multiple=True, default=(1,))
@click.option("--tokens", default=100)
@click.option("--threads", type=int)
@click.option("--policy", type=click.Choice(sorted(POLICIES)), default=DEFAULT_POLICY)
@click.option("--predictor", type=click.Choice([*PREDICTORS, NO_PREDICTOR]), default=DEFAULT_PREDICTOR)
@result_options
def main(
    model: str | None,
    quantize: str | None,
    percents: Sequence[int],
    batches: Sequence[int],
    tokens: int,
    threads: int | None,
    as_json: bool,
    out: Path | None,
    **chosen: str,
) -> None:
    """Load both, decode, compare."""
    folder = model or str(ensure_builtin_model(default_cache_dir()))
    config, prompts = resident_config(folder, quantize, threads), prompts_of(folder)
    resident = Engine.load(config)
    rows = []
    for percent in percents:
        cached = Engine.load(over_slots(config, quantize, percent, chosen["policy"], chosen["predictor"]))
        for prompt in prompts[-8:]:  # experts come into memory
            Answers(cached, [prompt], 1).finish()
        rows += [compare(resident, cached, prompts[:batch], tokens) for batch in batches]
        cached.close()
    resident.close()
    publish(
        "expert_cache_overhead",
        table,
        out,
        as_json=as_json,
        threads=config.num_threads,
        model=Path(folder).name,
        weight_format=config.weight_format,
        **chosen,
        rows=rows,
    )


def ratio(row: dict[str, Any]) -> float:
    """Return how long a step with a cache takes, as a share of the neighbouring step without."""
    return statistics.median(mine / other for mine, other in zip(row["slots_s"], row["resident_s"], strict=True))


def table(record: Record) -> Table:
    """Compare steps with and without a cache."""
    rows = [
        (
            f"{row['num_slots']} of {row['num_experts']} in slots, batch {row['batch_size']}",
            f"{statistics.median(row['resident_s']) * 1e3:.2f}",
            f"{statistics.median(row['slots_s']) * 1e3:.2f}",
            f"{ratio(row) - 1:+.1%}",
            f"{statistics.mean(row['slots_s']) * 1e3:.2f}",
            f"{row['stall_s'] / len(row['slots_s']) * 1e3:.2f}",
            f"{row['hit_rate']:.3f}",
        )
        for row in record["rows"]
    ]
    columns = ("", "resident ms", "slots ms", "more", "mean ms", "of it stall", "hit rate")
    title = f"A decode step with and without an expert cache, medians: {record['model']}, {record['weight_format']}"
    note = f"{record['policy']}, {record['predictor']}; steps in turns, the same tokens."
    return Table(title, columns, tuple(rows), (note,))


if __name__ == "__main__":
    run_study(main)
