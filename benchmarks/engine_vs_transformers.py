"""Claim: the engine is not slower than transformers' own `generate` at batch 1, and faster at 8 and 32.

Both run the same checkpoint in the same process, in the same type, with the same number of threads, greedily
and without stopping at end-of-sequence, in turns (ours, theirs, ours, theirs, ...), so that a drift of the
machine hits both alike. A row is the whole call: prefill and decode. Prompts are random tokens, new ones for
every repetition, so that no prefix is ever reused.

    python benchmarks/engine_vs_transformers.py MODEL_FOLDER --dtype float32 --out results.jsonl
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
import torch
import transformers
from rich.console import Console
from rich.table import Table

from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.engine.messages import Submission
from moeflow.engine.settings import Settings, decide


@dataclass(frozen=True)
class Case:
    """One row: so many prompts of so many tokens, so many new tokens each."""

    name: str
    batch_size: int
    prompt_len: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        """What the rate counts: new tokens, or prompt tokens where there is only one new one."""
        return self.batch_size * (self.new_tokens if self.new_tokens > 1 else self.prompt_len)


CASES = (
    Case("decode, batch 1", 1, 32, 64),
    Case("decode, batch 8", 8, 32, 64),
    Case("decode, batch 32", 32, 32, 64),
    Case("prefill 512", 1, 512, 1),
)

Generate = Callable[[list[list[int]], int], list[list[int]]]


def moeflow_generate(engine: Engine) -> Generate:
    """Return a function that generates with our engine."""

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.submit(Submission(str(index), prompt, sampling, seed=0))
        outputs: list[list[int]] = [[] for _ in prompts]
        while engine.has_work:
            for output in engine.step():
                outputs[int(output.request_id)] += output.token_ids
        return outputs

    return generate


def transformers_generate(model: transformers.PreTrainedModel) -> Generate:
    """Return a function that generates with transformers."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=False,
        )
        return out[:, ids.shape[1] :].tolist()

    return generate


def measure(case: Case, ours: Generate, theirs: Generate, vocab_size: int, repeats: int) -> dict[str, object]:
    """Run one case in turns and return rates and ratios."""
    rng = random.Random(case.name)
    rates: dict[str, list[float]] = {"moeflow": [], "transformers": []}
    equal = 0
    for repeat in range(repeats + 1):  # the first is a warm-up
        prompts = [[rng.randrange(3, vocab_size) for _ in range(case.prompt_len)] for _ in range(case.batch_size)]
        answers = []
        for name, generate in (("moeflow", ours), ("transformers", theirs)):
            start = time.perf_counter()
            answers.append(generate(prompts, case.new_tokens))
            if repeat:
                rates[name].append(case.tokens / (time.perf_counter() - start))
        equal += sum(a == b for a, b in zip(*answers, strict=True))
    ratios = [a / b for a, b in zip(rates["moeflow"], rates["transformers"], strict=True)]
    return {
        "case": case.name,
        "batch_size": case.batch_size,
        "prompt_len": case.prompt_len,
        "new_tokens": case.new_tokens,
        "tokens_per_second": rates,
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "equal_answers": f"{equal}/{case.batch_size * (repeats + 1)}",
    }


def machine() -> dict[str, object]:
    """Describe where and with what this ran."""
    model_name = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": model_name,
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip(),
    }


def show(rows: list[dict[str, object]], dtype: str) -> None:
    """Print the table that docs/benchmarks.md quotes."""
    table = Table(title=f"tokens/s, {dtype}, median (min-max)")
    for column in ("case", "moeflow", "transformers generate", "ratio", "equal answers"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        rates: dict[str, list[float]] = row["tokens_per_second"]  # type: ignore[assignment]
        cells = [f"{statistics.median(r):.1f} ({min(r):.1f}-{max(r):.1f})" for r in rates.values()]
        ratio = f"{row['ratio_median']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
        table.add_row(str(row["case"]), *cells, ratio, str(row["equal_answers"]))
    Console(width=120).print(table)


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False), help="Append the rows to this file, one JSON object a line.")
def main(model: str, dtype: str, repeats: int, out: str | None) -> None:
    """Compare the engine with transformers' generate on MODEL, a Hugging Face folder."""
    engine = Engine.load(decide(Settings(model=model, dtype=dtype, max_running=32, max_model_len=2048)))
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    transformers.logging.set_verbosity_error()
    rows = []
    for case in CASES:
        row = measure(case, moeflow_generate(engine), transformers_generate(hf_model), engine.model.vocab_size, repeats)
        rows.append(row)
        if out:
            with Path(out).open("a") as file:
                file.write(json.dumps({**machine(), "dtype": dtype, **row}) + "\n")
    show(rows, dtype)


if __name__ == "__main__":
    main()
