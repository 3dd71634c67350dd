"""`moeflow doctor`: checks this machine, and whether a model would run on it.

Only looks, and times a GPU for a second if there is one. Of a model it reads headers, and if asked all of its packed
file; nothing is loaded or built.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from moeflow.cli import lazy
from moeflow.cli.bench.output import PAGE_WIDTH
from moeflow.cli.doctor.diagnostics import REINSTALL, Finding, Verdict, examine, kept_prompts
from moeflow.cli.doctor.model_check import examine_builtin_model, examine_named_model, examine_planned_model
from moeflow.cli.help import Command
from moeflow.cli.options import served_engine_options

INDENT = 23  # of the text next to verdict and topic
MIN_WIDTH = 40
STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.MISSING: "red"}

EPILOG = """\b
Examples:
  moeflow doctor
      this machine, and the built-in model
  moeflow doctor ~/models/olmoe
      would this model run here, and with what limits?
  moeflow doctor ~/models/olmoe --kv-cache 8GiB --max-model-len 32768
  moeflow doctor ~/models/olmoe --quantize int4 --verify
      is the packed file undamaged?
  moeflow doctor --json | jq '.[] | select(.verdict != "ok")'

Every line says ok, warn (works, but slower or with less) or missing (needed). The exit code is 1 if
something needed is missing or damaged, 0 otherwise. With MODEL, only its headers are read: the answer comes
in a second even for a model of a hundred gigabytes. --verify reads all weights. It names
tensors with NaN or infinite numbers in the model's own files. It compares the file that `moeflow pack` made,
with the options that choose it, with its checksums: damaged experts, or the tensors that have weights in a
damaged part, are named."""


@click.command(cls=Command, epilog=EPILOG)
@served_engine_options
@click.option("--verify", "verifies", is_flag=True, help="Read all weights: find damage, NaN and infinity.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(overrides: dict[str, Any], verifies: bool, as_json: bool) -> int:
    """Check this machine: list its resources, problems and remedies.

    With MODEL, a Hugging Face folder or a .gguf file, check also whether it fits, and its memory.
    """
    findings = examine(overrides["cache_dir"], overrides.get("cpu_isa", ""))
    findings += kept_prompts(overrides.get("prompt_cache") or lazy.default_prompt_folder(overrides["cache_dir"]))
    try:
        findings += look_at(overrides, verifies)
    except ImportError as error:  # torch or one of its like is broken; looking at the rest was worth it
        findings.append(Finding("model", Verdict.MISSING, f"cannot be looked at: {error}", REINSTALL))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        show(findings)
    return int(any(finding.verdict is Verdict.MISSING for finding in findings))


def look_at(overrides: dict[str, Any], verifies: bool) -> list[Finding]:
    """Look at the model that is named, by the user or by his plan; else at the built-in one."""
    if overrides["model"] is not None:
        return examine_named_model(overrides, verifies=verifies)
    if overrides["plan_file"] is not None:
        return examine_planned_model(overrides, verifies=verifies)
    return examine_builtin_model(overrides, verifies=verifies)


def show(findings: list[Finding]) -> None:
    """Print each finding, followed by its remedy if it has one, in lines that fit a terminal."""
    console = Console(soft_wrap=True, highlight=False)
    width = min(console.width, PAGE_WIDTH) if console.is_terminal else PAGE_WIDTH
    for finding in findings:
        mark = f"[{STYLES[finding.verdict]}]{finding.verdict:<8}[/]"
        first, *more = wrapped(finding.found, width) or [""]
        console.print(f"{mark}{finding.topic:<15}{escape(first)}")
        for line in more:
            console.print(f"{'':<{INDENT}}{escape(line)}")
        for line in wrapped(finding.remedy or "", width):
            console.print(f"{'':<{INDENT}}[bold]{escape(line)}[/]")


def wrapped(text: str, width: int) -> list[str]:
    """Wrap a text to the right of the topics. A word that is too long, such as a path, is not split."""
    size = max(width - INDENT, MIN_WIDTH)
    return textwrap.wrap(text, size, break_long_words=False, break_on_hyphens=False)
