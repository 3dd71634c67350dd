"""Claim: by default a GGUF file answers as its own weights say, in whatever format it stores them.

Takes a real file as it is, and the same model stored anew in each format by gguf's own writer. The reference is
transformers' model in float64 with the weights that gguf's own `dequantize` reads from that very file, so differences
come from moeflow's rounding. Measured are: over texts, the Kullback-Leibler divergence of the next token's
distribution, how often the likeliest token is the same, and perplexity; over questions, whether whole greedy answers
are the same.

    python -m studies.gguf_answers --out docs/studies/results/gguf_answers.jsonl
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM

from moeflow import LLM, SamplingParams
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.weight_memory import FreshMemory
from moeflow.cli.bench.output import result_options
from moeflow.core.plan import Plan
from moeflow.engine.compute_setup import set_up
from moeflow.engine.runner_loading import make_allocator
from moeflow.models.loading import load_model
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.bare_model import run_sequence
from moeflow.train.builtin import builtin_source
from moeflow.train.calibration_text import calibration_text
from studies.gguf_answers_table import table
from studies.harness.command import run_study
from studies.harness.records import recorder

KINDS = {kind.name: kind for kind in (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)}
AS_IT_IS = "as it is"
WINDOW = 128  # tokens of a text that see each other
QUESTIONS = (
    "What is the capital of France?",
    "What is 7 times 8?",
    "Name three colours of the rainbow.",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
    "Write a sentence about the sea.",
    "Why is the sky blue?",
    "What is the opposite of hot?",
    "How many days has a week?",
    "Translate 'good morning' into Spanish.",
    "Which planet is the largest?",
    "Give one reason to read books.",
)


@dataclass(slots=True)
class Answers:
    """What a model makes of texts and questions."""

    logprobs: list[torch.Tensor] = field(default_factory=list)  # a text each, [T, V]
    greedy: list[list[int]] = field(default_factory=list)


def rewrite(source: Path, target: Path, kind: Kind) -> None:
    """Store a model's matrices in another format; embeddings of four-bit files have eight, as is usual."""
    reader = gguf.GGUFReader(source)
    field_of = reader.get_field("general.architecture")
    assert field_of is not None
    writer = gguf.GGUFWriter(target, field_of.contents())
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub_type = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), entry.types[0], sub_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        own = Kind.F32 if values.ndim == 1 else kind
        if tensor.name == "token_embd.weight" and kind in (Kind.Q4_0, Kind.Q4_1):
            own = Kind.Q8_0
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.inference_mode()
def reference(file: Path, texts: Sequence[list[int]], prompts: Sequence[list[int]], new_tokens: int) -> Answers:
    """Return what transformers makes of a file's weights in float64."""
    with closing(open_checkpoint(file)) as checkpoint:
        weights = {name: checkpoint.read(name).double() for name in checkpoint.tensors}
        config = LlamaConfig(**checkpoint.config)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # the only thing that is computed, not stored
    model.eval()
    answers = Answers()
    for text in texts:
        answers.logprobs.append(torch.log_softmax(model(torch.tensor([text])).logits[0], -1))
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        answers.greedy.append(found[0, len(prompt) :].tolist())
    return answers


def ours(plan: Plan, texts: Sequence[list[int]], prompts: Sequence[list[int]], new_tokens: int) -> Answers:
    """Return what moeflow makes of it."""
    answers, config = Answers(), plan.config
    set_up(config)
    with closing(open_checkpoint(config.model_path)) as checkpoint:
        model = load_model(checkpoint, make_allocator(config, FreshMemory()), num_threads=config.num_threads)
    with torch.inference_mode():
        for text in texts:
            answers.logprobs.append(torch.log_softmax(model.logits(run_sequence(model, text)).double(), -1))
    del model
    greedy = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=new_tokens)
    with LLM.from_plan(plan) as llm:
        results = llm.generate(prompts, greedy, progress=False)
    answers.greedy = [result.outputs[0].token_ids for result in results]
    return answers


def compare(want: Answers, got: Answers, texts: Sequence[list[int]]) -> dict[str, Any]:
    """Return the figures of a record."""
    divergences, same_likeliest, losses = [], [], []
    for text, exact, tested in zip(texts, want.logprobs, got.logprobs, strict=True):
        divergences.append((exact.exp() * (exact - tested)).sum(-1))
        same_likeliest.append(exact.argmax(-1) == tested.argmax(-1))
        targets = torch.tensor(text[1:]).unsqueeze(1)
        losses.append(torch.cat([-rows[:-1].gather(1, targets) for rows in (exact, tested)], dim=1))
    divergence = torch.cat(divergences)
    own, ours = torch.cat(losses).mean(0).tolist()
    same = [_is_same(a, b) for a, b in zip(want.greedy, got.greedy, strict=True)]
    return {
        "num_tokens": len(divergence),
        "divergence": divergence.mean().item(),
        "largest_divergence": divergence.max().item(),
        "same_likeliest_share": torch.cat(same_likeliest).double().mean().item(),
        "reference_perplexity": math.exp(own),
        "perplexity": math.exp(ours),
        "num_answers": len(same),
        "num_same_answers": sum(same),
    }


def _is_same(want: list[int], got: list[int]) -> bool:
    """Compare answers; only one of the two may tell the token that ends it."""
    shorter = min(len(want), len(got))
    return want[:shorter] == got[:shorter] and max(len(want), len(got)) - shorter <= 1


def _files(source: Path, formats: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield each format's file, which is gone afterwards."""
    for name in formats:
        if name == AS_IT_IS:
            yield name, source
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.gguf"
            rewrite(source, file, KINDS[name])
            yield name, file


def _texts(tokenizer: Tokenizer, num_tokens: int) -> list[list[int]]:
    """Return windows of the texts that nothing was fitted on, as many from each."""
    held_out = calibration_text(tokenizer.encode).held_out
    windows = [text[start : start + WINDOW] for start in range(0, 4096, WINDOW) for text in held_out]
    return [window for window in windows if len(window) > 1][: max(num_tokens // WINDOW, 1)]


@click.command(help=__doc__)
@click.option("--source", type=click.Path(dir_okay=False, exists=True, path_type=Path), help="[default: SmolLM2's]")
@click.option("--format", "formats", multiple=True, type=click.Choice([AS_IT_IS, *KINDS]), help="[default: all]")
@click.option("--quantize", type=click.Choice(["int8", "int4"]), help="As of `moeflow serve`, instead of the default.")
@click.option("--tokens", default=1024, show_default=True, help="Of text.")
@click.option("--answers", default=len(QUESTIONS), show_default=True, help="How many questions are asked.")
@click.option("--new-tokens", default=32, show_default=True, help="Of an answer, at most.")
@click.option("--threads", default=2, show_default=True)
@result_options
def main(
    source: Path | None,
    formats: tuple[str, ...],
    quantize: str | None,
    tokens: int,
    answers: int,
    new_tokens: int,
    threads: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure, print and keep."""
    torch.set_num_threads(threads)
    source = source or builtin_source()
    tokenizer = Tokenizer.load(source)
    texts = _texts(tokenizer, tokens)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": it}]) for it in QUESTIONS[:answers]]
    to = recorder("gguf_answers", out, as_json=as_json)
    for name, file in _files(source, formats or (AS_IT_IS, *KINDS)):
        plan = resolve(
            Settings(model=str(file), quantize=quantize, device="cpu", num_threads=threads, exact_activations=True)
        ).plan
        want = reference(file, texts, prompts, new_tokens)
        figures = compare(want, ours(plan, texts, prompts, new_tokens), texts)
        config = plan.config
        about = {"format": name, "weight_format": config.weight_format, "embedding_format": config.embedding_format}
        to.add({"model": source.name, **about, **figures}, seed=0, threads=threads)
    to.show(lambda records: [table(records)])


if __name__ == "__main__":
    run_study(main)
