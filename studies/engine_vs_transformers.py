"""Claim: the engine is not slower than transformers' own `generate` at batch 1, and faster at 8 and 32.

Both run the same checkpoint in the same process, in the same type, with the same number of threads, greedily and
without stopping at end-of-sequence. They alternate (ours, theirs, ours, theirs, ...), so that a drift of the machine
hits both alike. A row is the whole call: prefill and decode. Prompts are random tokens, new ones for every repetition,
so that no prefix is ever reused. Of an encoder-decoder they are what is encoded (`random_switch.py` writes one;
`random_family.py` models of all other families). Before each repetition the memory's bandwidth is measured. With the
least bytes that a row reads, it gives the limit for any engine.

    python -m studies.engine_vs_transformers MODEL_FOLDER --dtype float32 --out results.jsonl
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import transformers

from moeflow.bench import engine_speed
from moeflow.checkpoint.open import open_checkpoint
from moeflow.cli.bench.output import result_options
from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import Submission
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.kernels.ceilings import measure_read, torch_threads
from moeflow.models.registry import read_model_config
from moeflow.planner.choices.offload_plan import costs_of
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from studies.families_table import versus_table
from studies.harness.command import run_study
from studies.harness.records import publish


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

    def num_bytes(self, costs: ModelCosts) -> float:
        """Return what a decoder reads at least: all prompts in one pass, then a pass for each further token."""
        passes = [engine_speed.SpeedCase(1, self.batch_size * self.prompt_len, 0)]
        if self.new_tokens > 1:
            passes.append(engine_speed.SpeedCase(self.batch_size, self.prompt_len, self.new_tokens - 1))
        return sum(case.cost(costs)[0] for case in passes)


CASES = (
    Case("decode, batch 1", 1, 32, 64),
    Case("decode, batch 8", 8, 32, 64),
    Case("decode, batch 32", 32, 32, 64),
    Case("prefill 512", 1, 512, 1),
)

ENCODER_CASES = (
    Case("input 128, batch 1", 1, 128, 32),
    Case("input 128, batch 8", 8, 128, 32),
    Case("input 128, batch 64", 64, 128, 32),
    Case("input 512, one token, batch 8", 8, 512, 1),
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


def transformers_generate(model: transformers.PreTrainedModel, num_threads: int) -> Generate:
    """Return a function that generates with transformers, in as many of torch's threads as our engine has."""
    model.generation_config.eos_token_id = None  # which min_new_tokens would forbid, and so change answers

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch_threads(num_threads):
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
            )
        return out[:, 1 if model.config.is_encoder_decoder else ids.shape[1] :].tolist()

    return generate


def measure(
    case: Case, ours: Generate, theirs: Generate, vocab_size: int, repeats: int, sample: Callable[[], None]
) -> dict[str, Any]:
    """Run one case alternately and return the rates; `sample` is called before each turn that counts."""
    rng = random.Random(case.name)
    rates: dict[str, list[float]] = {"moeflow": [], "transformers": []}
    equal = 0
    for repeat in range(repeats + 1):  # the first is a warm-up
        prompts = [[rng.randrange(3, vocab_size) for _ in range(case.prompt_len)] for _ in range(case.batch_size)]
        answers = []
        if repeat:
            sample()
        for name, generate in (("moeflow", ours), ("transformers", theirs)):
            start = time.perf_counter()
            answers.append(generate(prompts, case.new_tokens))
            if repeat:
                rates[name].append(case.tokens / (time.perf_counter() - start))
        equal += sum(a == b for a, b in zip(*answers, strict=True))
    return {
        **dataclasses.asdict(case),
        "tokens_per_s": rates,
        "equal_answers": f"{equal}/{case.batch_size * (repeats + 1)}",
    }


def costs_in(config: EngineConfig) -> ModelCosts:
    """Return what passes cost of the model that is measured."""
    with closing(open_checkpoint(config.model_path)) as checkpoint:
        return costs_of(read_model_config(checkpoint), config)


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--case", "cases", multiple=True, help="Only this row: the beginning of its name. May be given again.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@result_options
def main(model: str, dtype: str, cases: tuple[str, ...], repeats: int, as_json: bool, out: Path | None) -> None:
    """Compare the engine with transformers' generate on MODEL, a Hugging Face folder."""
    config = resolve(Settings(model=model, dtype=dtype, max_num_seqs=64, max_model_len=1024)).config
    engine = Engine.load(config)
    is_encoder = engine.model.encoder is not None
    kind = transformers.AutoModelForSeq2SeqLM if is_encoder else transformers.AutoModelForCausalLM
    hf_model = kind.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    transformers.logging.set_verbosity_error()
    num_threads, costs = engine.config.num_threads, costs_in(config)
    ours, theirs = moeflow_generate(engine), transformers_generate(hf_model, num_threads)
    read_bytes_per_s: list[float] = []

    def sample() -> None:
        read_bytes_per_s.append(measure_read(num_threads))

    measured = [
        measure(case, ours, theirs, engine.model.vocab_size, repeats, sample)
        | ({} if is_encoder else {"num_bytes": case.num_bytes(costs)})
        for case in (ENCODER_CASES if is_encoder else CASES)
        if not cases or case.name.startswith(cases)
    ]
    publish(
        "engine_vs_transformers",
        versus_table,
        out,
        as_json=as_json,
        threads=num_threads,
        model=engine.model.name,
        weight_format=dtype,
        num_parameters=engine.model.num_parameters,
        weight_bytes=int(costs.model_bytes),
        read_bytes_per_s=read_bytes_per_s,
        cases=measured,
    )


if __name__ == "__main__":
    run_study(main)
