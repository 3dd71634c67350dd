"""`moeflow generate`: completes prompts and exits. Text on stdout, or one JSON document; everything else on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from moeflow.cli.help import Command
from moeflow.cli.local_model import fetch_if_named, load
from moeflow.cli.options import engine_options, explain_option, pull_option, sampling_options
from moeflow.cli.token_trees import check_drafts, token_trees_option, write_token_trees
from moeflow.core.errors import EngineError
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.trial import NOT_TRIED
from moeflow.core.units import format_bytes
from moeflow.planner.usage import requests_of

if TYPE_CHECKING:
    from moeflow.core.engine_messages import EngineStats
    from moeflow.engine.results import RequestOutput
    from moeflow.llm import LLM
    from moeflow.text.drafted_passes import DraftedPass

EPILOG = """\b
Examples:
  moeflow generate -p "The capital of France is" --max-tokens 8
  moeflow generate Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M -p "Once"
      a model that `moeflow pull` has fetched
  moeflow generate -p "What is the capital of France?" --chat --stats
  moeflow generate ~/models/olmoe -p "Once" -p "Twice" --json | jq \\
      -r '.results[].text'
  moeflow generate --temperature 0.7 --seed 1 < prompt.txt
  echo "What is the capital of France?" | moeflow generate --chat
  moeflow generate -p "1, 2, 3, 4, 5, 6," --speculator suffix \\
      --token-trees trees.dot && dot -Tsvg trees.dot > trees.svg

Without -p and --prompt-file, what is piped in is the prompt. One newline at its end, or a file's, is dropped. A prompt
is completed as it stands; --chat puts it into the model's chat template as a user's message. All prompts are computed
together; of several, each answer stands under its number and prompt. Without sampling options the model's own
defaults hold, as in every verb. --temperature 0 takes the likeliest token each time."""

MAX_TOKENS = 512  # default length of an answer
LABEL_WIDTH = 72  # of a prompt that is repeated above its answer


@dataclass(frozen=True, slots=True)
class Timings:
    """How long it took, in seconds."""

    load_s: float
    generate_s: float


@click.command(cls=Command, epilog=EPILOG)
@engine_options
@click.option("-p", "--prompt", "prompts", multiple=True, help="A prompt; may be given several times.")
@click.option(
    "--prompt-file",
    "files",
    type=click.File(encoding="utf-8-sig"),
    multiple=True,
    help="A file that holds one prompt; - is stdin. May be given several times.",
)
@click.option("--chat", "is_chat", is_flag=True, help="Ask each prompt as a user's message.")
@sampling_options
@token_trees_option
@pull_option
@explain_option
@click.option("--stats", "with_stats", is_flag=True, help="Print token counts and speed on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print texts, token ids, usage and timings as JSON.")
def generate(
    overrides: dict[str, Any],
    prompts: tuple[str, ...],
    files: tuple[TextIO, ...],
    is_chat: bool,
    sampling: SamplingParams,
    token_trees_file: Path | None,
    pulls: bool,
    explains: bool,
    with_stats: bool,
    as_json: bool,
) -> None:
    """Complete prompts and exit, for scripts.

    MODEL is a Hugging Face folder, a .gguf file, or the name of a pulled model; without it, the built-in model is used.
    """
    asked = [*prompts, *(without_last_newline(file.read()) for file in files)] or piped_prompt()
    if not asked:
        raise click.UsageError("there is no prompt; give one with -p or --prompt-file, or pipe it in")
    if token_trees_file is not None:
        check_drafts(overrides)
        sampling = replace(sampling, token_trees=True)
    if pulls:
        fetch_if_named(overrides["model"])
    started = time.monotonic()
    usage = requests_of([len(prompt.encode()) for prompt in asked], sampling.max_tokens or MAX_TOKENS)
    with load(overrides, usage, explains=explains, shows_expected=with_stats) as llm:
        loaded = time.monotonic()
        results = complete(llm, asked, sampling, is_chat)
        timings = Timings(load_s=loaded - started, generate_s=time.monotonic() - loaded)
        name, stats = llm.model.name, llm.stats()
    show_json(name, asked, results, timings) if as_json else show_text(asked, results)
    if token_trees_file is not None:
        write_token_trees(token_trees_file, drafts(asked, results))
    if with_stats:
        click.echo(summary(results, timings), err=True)
        if stats.gpu_pairs_total + stats.cpu_pairs_total:
            click.echo(hybrid_summary(stats), err=True)
        elif stats.experts_on_disk:
            click.echo(expert_summary(stats), err=True)
        if stats.expert_choices_total:
            share = stats.dropped_choices_total / stats.expert_choices_total
            click.echo(f"{share:.1%} of {stats.expert_choices_total} choices of experts were dropped", err=True)
    errors = [output.error for result in results for output in result.outputs if output.error]
    if errors:
        raise EngineError(errors[0])


def piped_prompt() -> list[str]:
    """Return redirected stdin as one prompt; nothing if it is empty or a terminal."""
    if sys.stdin.isatty():
        return []
    with click.open_file("-", encoding="utf-8") as stdin:
        text = without_last_newline(stdin.read())
    return [text] if text else []


def without_last_newline(text: str) -> str:
    """Return a text as `-p` would have it: `echo` and editors end it with a newline, after which models answer else."""
    return text.removesuffix("\n")


def complete(llm: LLM, prompts: list[str], sampling: SamplingParams, is_chat: bool) -> list[RequestOutput]:
    """Complete all prompts concurrently, with a progress bar on a terminal."""
    watched = sys.stderr.isatty()
    if is_chat:
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        bounded = bound(llm, conversations, sampling, llm.tokenizer.apply_chat_template)
        return llm.chat(conversations, bounded, progress=watched)
    return llm.generate(prompts, bound(llm, prompts, sampling, llm.tokenizer.encode), progress=watched)


def bound(
    llm: LLM, prompts: list[Any], sampling: SamplingParams, tokenize: Callable[..., list[int]]
) -> list[SamplingParams]:
    """Return each prompt's parameters. Without a limit by the user, the context bounds the length of an answer."""
    if sampling.max_tokens is not None:
        return [sampling] * len(prompts)
    context = llm.model.max_model_len
    left = [context - len(tokenize(prompt, max_tokens=context)) for prompt in prompts]
    return [replace(sampling, max_tokens=min(MAX_TOKENS, max(num_left, 1))) for num_left in left]


def show_text(prompts: list[str], results: list[RequestOutput]) -> None:
    """Print the completion; of several prompts, each under a line that says whose it is."""
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        if len(prompts) > 1:
            click.echo(("\n" if number else "") + f"[{number + 1}] {beginning(prompt)}")
        click.echo(result.outputs[0].text)


def drafts(prompts: list[str], results: list[RequestOutput]) -> dict[str, list[DraftedPass]]:
    """Return the drafts of each prompt, by its number and first words."""
    return {
        f"[{number}] {beginning(prompt)}": result.outputs[0].drafted_passes or []
        for number, (prompt, result) in enumerate(zip(prompts, results, strict=True), start=1)
    }


def beginning(prompt: str) -> str:
    """Return a prompt on one line, cut where it is long."""
    line = " ".join(prompt.split())
    return line if len(line) <= LABEL_WIDTH else line[: LABEL_WIDTH - 3] + "..."


def show_json(name: str, prompts: list[str], results: list[RequestOutput], timings: Timings) -> None:
    """Print everything as one document."""
    document = {
        "model": name,
        "results": [
            {
                "prompt": prompt,
                "text": result.outputs[0].text,
                "token_ids": result.outputs[0].token_ids,
                "finish_reason": result.outputs[0].finish_reason,
                "usage": {
                    "prompt_tokens": len(result.prompt_token_ids),
                    "completion_tokens": len(result.outputs[0].token_ids),
                    "cached_tokens": result.num_cached_tokens,
                },
            }
            for prompt, result in zip(prompts, results, strict=True)
        ],
        "timings": {
            "load_s": round(timings.load_s, 3),
            "generate_s": round(timings.generate_s, 3),
            "tokens_per_second": round(tokens_per_second(results, timings), 2),
        },
    }
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def tokens_per_second(results: list[RequestOutput], timings: Timings) -> float:
    """Return generated tokens a second over all prompts, their prefill included."""
    return num_generated(results) / timings.generate_s if timings.generate_s else 0.0


def num_generated(results: list[RequestOutput]) -> int:
    """Return how many tokens were generated."""
    return sum(len(output.token_ids) for result in results for output in result.outputs)


def summary(results: list[RequestOutput], timings: Timings) -> str:
    """Print the time and speed in one line."""
    num_prompt = sum(len(result.prompt_token_ids) for result in results)
    return (
        f"{num_prompt} prompt tokens, {num_generated(results)} generated "
        f"in {timings.generate_s:.2f} s ({tokens_per_second(results, timings):.1f} tokens/s), "
        f"loaded in {timings.load_s:.2f} s"
    )


def hybrid_summary(stats: EngineStats) -> str:
    """Write a table of the kinds of memory with experts, and how a GPU and the CPU have shared these."""
    tiers = stats.expert_tiers
    num_needed = max(sum(tier.num_needed for tier in tiers), 1)
    rows = [f"{tier.name:<12}{tier.num_experts:>8}{tier.num_needed / num_needed:>8.0%}" for tier in tiers]
    read = ""
    if stats.experts_on_disk:
        read = (
            f"; {format_bytes(stats.expert_demand_bytes_total)} were read, "
            f"which took {stats.expert_stall_s_total:.2f} s of it"
        )
    return "\n".join(
        [
            f"{'experts':<12}{'there':>8}{'needed':>8}",
            *rows,
            f"the GPU computed {stats.gpu_share:.0%} of choices; the CPU computed for "
            f"{stats.cpu_experts_s_total:.2f} s and waited {stats.cpu_wait_s_total:.2f} s; "
            f"{stats.expert_moves_total} moved{read}",
        ]
    )


def expert_summary(stats: EngineStats) -> str:
    """Write in a line what became of experts that come from disk."""
    ahead = ""
    if stats.expert_prefetched_bytes_total:
        ahead = (
            f", {format_bytes(stats.expert_prefetched_bytes_total)} ahead "
            f"({format_bytes(stats.expert_used_bytes_total)} of it needed)"
        )
    return (
        f"experts: {stats.experts_in_slots} of {stats.experts_on_disk} in memory, {stats.expert_hit_rate:.0%} of those "
        f"needed were there; read {format_bytes(stats.expert_demand_bytes_total)} on demand{ahead}, "
        f"waited {stats.expert_stall_s_total:.2f} s"
        + "".join(f"; {trial.name}: {trial.reason}" for trial in stats.trials if trial.reason != NOT_TRIED)
    )
