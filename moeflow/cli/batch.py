"""`moeflow batch`: answers a file of requests in OpenAI's batch format. Results go to a file; progress to stderr."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from moeflow.cli import lazy
from moeflow.cli.bench.output import repeated_command
from moeflow.cli.help import Command
from moeflow.cli.local_model import fetch_if_named, planned
from moeflow.cli.options import explain_option, pull_option, served_engine_options
from moeflow.cli.params import NEW_FILE
from moeflow.cli.plain_progress import PlainLines, duration_text
from moeflow.cli.plan.inputs import batch_usage
from moeflow.cli.progress import drawn
from moeflow.core.errors import EngineError

if TYPE_CHECKING:
    from moeflow.core.plan import Plan
    from moeflow.server.jobs.journal import ResultJournal, Totals
    from moeflow.server.jobs.local import JobState

EPILOG = """\b
Examples:
  moeflow batch requests.jsonl -o answers.jsonl
  moeflow batch requests.jsonl ~/models/olmoe -o answers.jsonl \\
      --max-num-seqs 64 --json
  moeflow batch requests.jsonl ~/models/olmoe -o answers.jsonl \\
      --replicas 4 --threads 8 --ray-address auto
\b
Each line of the input is one request, in OpenAI's batch format:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 64}}

Answers are written as they are ready, each with its custom_id. At the end, they are in the order of the input.
A request that the model cannot answer becomes a line of the error file. Stopped by Ctrl-C, a kill or a loss of power,
the same command continues: no request is lost, none is answered twice. To retry failed ones, delete the error file."""

EXIT_INTERRUPTED = 130


@click.command(cls=Command, epilog=EPILOG)
@click.argument("source", metavar="INPUT", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=NEW_FILE,
    help="File for the answers; if it is there, it must be this job's.",
)
@click.option(
    "--errors",
    type=NEW_FILE,
    help="File for the errors.  [default: OUTPUT with .errors before its suffix]",
)
@click.option("--model-name", help="The model's name, as requests call it.  [default: its folder or file]")
@served_engine_options
@pull_option
@explain_option
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON at the end.")
def batch(
    source: Path,
    output: Path,
    errors: Path | None,
    model_name: str | None,
    overrides: dict[str, Any],
    pulls: bool,
    explains: bool,
    as_json: bool,
) -> int:
    """Answer a file of requests, each with its own settings; stop and go on at any time.

    MODEL is a Hugging Face folder, a .gguf file, or the name of a pulled model; without it, the built-in model answers.
    """
    errors = errors or output.with_name(f"{output.stem}.errors{output.suffix}")
    if any(_is_same(*pair) for pair in itertools.combinations((source, output, errors), 2)):
        raise click.UsageError("input, output and error file must be three different files")
    result_ids = lazy.check_input(source)
    if pulls:
        fetch_if_named(overrides["model"])
    overrides = {**overrides, "model_name": model_name}
    plan = planned(overrides, batch_usage(source, len(result_ids)), explains=explains, is_served=True)
    name = plan.config.model_name
    with lazy.ResultJournal(output, errors, result_ids, name) as journal:
        job = Job(source, output, errors, name, len(result_ids), len(journal.done))
        is_complete = job.run(plan, journal) if job.num_before < job.total else True
        if is_complete:
            journal.put_in_order()
        totals = journal.totals
    if as_json:
        click.echo(json.dumps(job.summary(totals), indent=2, ensure_ascii=False))
    click.echo(job.last_words(totals, is_complete=is_complete), err=True)
    return int(totals.failed > 0) if is_complete else EXIT_INTERRUPTED


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two names lead to one file, which need not be there yet."""
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


@dataclasses.dataclass(slots=True)
class Job:
    """One run of the command, and what there is to say about it."""

    source: Path
    output: Path
    errors: Path
    model: str
    total: int
    num_before: int  # requests that an earlier run has answered
    load_s: float = 0.0
    answer_s: float = 0.0
    state: JobState | None = None  # the newest

    def run(self, plan: Plan, journal: ResultJournal) -> bool:
        """Answer the remaining requests; return whether all were answered.

        Raises: OSError if results cannot be written; EngineError; what loading raises.
        """
        if self.num_before:
            click.echo(f"{self.num_before} of {self.total} requests were answered before.", err=True)
        started_s = time.monotonic()
        with shown(self.total, self.num_before) as view:
            try:
                work = lazy.answer_file(
                    plan, self.source, journal, self.total, on_loading=view.loading, on_state=view.show
                )
                self.state = asyncio.run(work)
            except (KeyboardInterrupt, asyncio.CancelledError):  # Ctrl-C, SIGTERM
                self.state = view.state
                return False
            except (OSError, EngineError):  # such as a full disk; the shell reports it
                click.echo(self.last_words(journal.totals, is_complete=False), err=True)
                raise
            finally:
                answering_s = view.started_s or time.monotonic()
                self.load_s, self.answer_s = answering_s - started_s, time.monotonic() - answering_s
        return True

    def summary(self, totals: Totals) -> dict[str, Any]:
        """Return what --json prints; tokens are those of all results, also of earlier runs'."""
        generated = self.state.generated_tokens if self.state else 0
        return {
            "model": self.model,
            "input": str(self.source),
            "output": str(self.output),
            "error_file": str(self.errors) if totals.failed else None,
            "requests": {
                "total": self.total,
                "completed": totals.completed,
                "failed": totals.failed,
                "answered_before": self.num_before,
            },
            "usage": {
                "prompt_tokens": totals.prompt_tokens,
                "cached_tokens": totals.cached_tokens,
                "completion_tokens": totals.completion_tokens,
            },
            "this_run": {
                "load_s": round(self.load_s, 3),
                "answer_s": round(self.answer_s, 3),
                "generated_tokens": generated,
                "tokens_per_second": round(generated / self.answer_s, 2) if self.answer_s else 0.0,
            },
        }

    def last_words(self, totals: Totals, *, is_complete: bool) -> str:
        """Return how it ended and what to do next."""
        done = totals.completed + totals.failed
        if not is_complete:
            return (
                f"Stopped: {done} of {self.total} requests are done. "
                f"The same command goes on from here:\n  {shlex.join(repeated_command())}"
            )
        words = f"{totals.completed} of {self.total} requests answered, in {self.output}."
        if totals.failed:
            words += f" {totals.failed} failed; {self.errors} says why. To try these again, delete it and repeat."
        return words


class View:
    """Shows how far the job is: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, progress: Progress, total: int, num_before: int) -> None:
        self.state: JobState | None = None
        self._progress = progress
        self._task = progress.add_task("loading", total=None, speed="", left="")
        self._total = total
        self._num_before = num_before
        self.started_s: float | None = None  # when the model was loaded
        self._plain = PlainLines()

    def loading(self, done: int, total: int) -> None:
        """Show how much of the model is loaded."""
        self._progress.update(self._task, completed=done, total=total)

    def show(self, state: JobState) -> None:
        """Show how many requests are done."""
        now_s = time.monotonic()
        self.started_s = self.started_s or now_s
        self.state = state
        left = self._left(state, now_s - self.started_s)
        speed = f"{state.tokens_per_s:.0f} tokens/s"
        if state.num_replicas > 1:
            speed += f", {state.num_ready}/{state.num_replicas} replicas"
        failed = f", {state.num_failed} failed" if state.num_failed else ""
        self._progress.update(
            self._task,
            description="answering",
            completed=state.num_done,
            total=self._total,
            speed=speed + failed,
            left=left,
        )
        if self._progress.disable:
            figures = (f"{state.num_done}/{self._total} requests{failed}", speed, left)
            self._plain.show(lambda: ", ".join(filter(None, figures)))

    def _left(self, state: JobState, elapsed_s: float) -> str:
        num_new = state.num_done - self._num_before
        if not num_new:
            return ""
        return f"{duration_text(elapsed_s / num_new * (self._total - state.num_done))} left"


@contextmanager
def shown(total: int, num_before: int) -> Iterator[View]:
    """Yield what shows the job's progress; a bar vanishes at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[left]}"),
        TimeElapsedColumn(),
    )
    with drawn(*columns) as progress:
        yield View(progress, total, num_before)
