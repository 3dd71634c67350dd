"""`moeflow bench batch`: jobs of many requests, with the paper's lengths: padded and not, alone and next to others."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from moeflow.bench.tables import batch_tables
from moeflow.cli import lazy
from moeflow.cli.bench.output import Recorder, result_options
from moeflow.cli.help import Command
from moeflow.cli.local_model import planned
from moeflow.cli.options import engine_options_but
from moeflow.cli.progress import bar
from moeflow.planner.usage import SERVING
from moeflow.workload.offline import MTBENCH_NEW, SHAPES, made_up_lengths, read_questions, replicated_lengths
from moeflow.workload.poisson import WorkloadSpec

EPILOG = """\b
Examples:
  moeflow bench batch --workload reasoning -n 64
  moeflow bench batch --questions mt_bench_questions.jsonl --new 32 \\
      --new 128 --kv-cache 256MiB
  moeflow bench batch --workload reasoning --interactive-rate 0.5 \\
      --interactive-requests 32

Workloads have the lengths that MoE-Lightning measures with: MTBench's questions, from a file of yours with a JSON
object {"turns": ["question", ...]} a line, are taken again and again; "reasoning" (242 tokens on average, 256 at most)
and "summarization" (1693, 1984) are made up. "padded" is static batching, each batch padded to its longest prompt.
With --interactive-rate, interactive requests arrive at random while a job runs, and are compared with the same ones
alone."""


@click.command(cls=Command, epilog=EPILOG, context_settings={"show_default": True})
@engine_options_but("prefix_caching", "prompt_cache", "prompt_cache_bytes")
@click.option(
    "--workload", "names", type=click.Choice([*SHAPES, "mtbench"]), multiple=True, help="What to run; may be repeated."
)
@click.option(
    "--questions",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="MTBench's questions, for --workload mtbench.",
)
@click.option("-n", "--num-requests", type=click.IntRange(1, 1_000_000), default=64, help="Requests of a job.")
@click.option(
    "--new",
    "num_new",
    type=click.IntRange(1),
    multiple=True,
    help="Tokens of an answer; may be repeated.  [default: the paper's 50 and 64, 128 for MTBench]",
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice(["continuous", "static"]),
    multiple=True,
    default=("continuous", "static"),
    help="Batches of different lengths, or padded ones; may be given twice.",
)
@click.option("--interactive-rate", type=float, help="Interactive requests/s to send while a job runs.")
@click.option("--interactive-requests", type=click.IntRange(1), default=32, help="So many of them.")
@click.option("--repeats", type=click.IntRange(1), default=1, help="Measurements of each.")
@click.option("--seed", type=int, default=0, help="The same seed makes the same requests.")
@result_options
def batch(
    overrides: dict[str, Any],
    names: tuple[str, ...],
    questions: Path | None,
    num_requests: int,
    num_new: tuple[int, ...],
    policies: tuple[str, ...],
    interactive_rate: float | None,
    interactive_requests: int,
    repeats: int,
    seed: int,
    as_json: bool,
    out: Path | None,
) -> int:
    """Measure jobs of many requests: tokens a second, the cost of padding, and what interactive requests feel.

    MODEL is a Hugging Face folder or a .gguf file; without it, the built-in model is measured.
    """
    names = tuple(dict.fromkeys(names)) or (("mtbench",) if questions else ("reasoning",))
    if ("mtbench" in names) != (questions is not None):
        raise click.UsageError("--workload mtbench needs --questions, and vice versa")
    asked = read_questions(questions) if questions else []
    if interactive_rate is not None:
        WorkloadSpec(rate=interactive_rate, num_requests=interactive_requests, vocab_size=1)
    recorder = Recorder("batch", out, as_json)
    run = BatchBench(policies, repeats, seed, interactive_rate, interactive_requests, recorder)
    try:
        asyncio.run(run.all(overrides, names, asked, num_requests, num_new))
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    recorder.show(batch_tables)
    return 130 if interrupted else 0


@dataclasses.dataclass(slots=True)
class BatchBench:
    """One invocation."""

    policies: tuple[str, ...]
    repeats: int
    seed: int
    interactive_rate: float | None
    interactive_requests: int
    recorder: Recorder

    async def all(
        self,
        overrides: dict[str, Any],
        names: tuple[str, ...],
        questions: list[str],
        num_requests: int,
        num_new: tuple[int, ...],
    ) -> None:
        """Measure every workload."""
        config = planned(overrides, SERVING, prefix_caching=False).config
        with closing(lazy.open_checkpoint(config.model_path)) as checkpoint:
            vocab_size = lazy.read_model_config(checkpoint).vocab_size
        jobs = []
        for name in names:
            if name == "mtbench":
                lengths = replicated_lengths(lazy.question_lengths(config, questions), num_requests, self.seed)
            else:
                lengths = made_up_lengths(SHAPES[name], num_requests, self.seed)
            usual = MTBENCH_NEW if name == "mtbench" else SHAPES[name].num_new
            jobs += [lazy.BatchJob(name, lengths, new, self.seed) for new in num_new or (usual,)]
        for job in jobs:
            for repetition in range(self.repeats):
                await self._measure(config, job, vocab_size, repetition)

    async def _measure(self, config: Any, job: Any, vocab_size: int, repetition: int) -> None:
        policies = tuple(dict.fromkeys(self.policies))
        with bar(1 if self.interactive_rate else len(policies)) as shown:
            progress = self.recorder.progress(shown, config.num_threads, counts_requests=False)
            if self.interactive_rate is not None:
                traffic = WorkloadSpec(
                    rate=self.interactive_rate,
                    num_requests=self.interactive_requests,
                    min_new=32,
                    vocab_size=vocab_size,
                    seed=self.seed + repetition,
                )
                await lazy.run_beside(config, job, traffic, repetition, progress)
                return
            for policy in policies:
                longest = max(job.prompt_lengths)
                system = lazy.with_policy(config, policy, max_prompt=longest, batch_timeout_s=0.05)
                await lazy.run_batch_job(system, job, vocab_size, repetition, progress)
