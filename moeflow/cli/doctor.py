"""`moeflow doctor`: what this machine has, what is missing, and whether a model would run here.

Only looks, and times a GPU for a second if there is one. Of a model it reads headers, and if asked all of its packed
file; nothing is loaded or built.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from moeflow.cli.findings import REINSTALL, Finding, Verdict, examine
from moeflow.cli.fitting import examine_builtin_model, examine_model, examine_planned_model
from moeflow.cli.options import engine_options

STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.MISSING: "red"}

EPILOG = """\b
Examples:
  moeflow doctor                         this machine, and the built-in model
  moeflow doctor ~/models/olmoe          would this model run here, and with what limits?
  moeflow doctor ~/models/olmoe --kv-cache 8GiB --max-model-len 32768
  moeflow doctor ~/models/olmoe --quantize int4 --verify      is the packed file undamaged?
  moeflow doctor --json | jq '.[] | select(.verdict != "ok")'

Every line says ok, warn (works, but slower or with less) or missing (needed). The exit code is 1 if
something needed is missing or damaged, 0 otherwise. With MODEL, only its headers are read: the answer comes
in a second even for a model of a hundred gigabytes. --verify reads all of the file that `moeflow pack` made,
with the options that choose it, and compares it with its checksums: damaged experts, or the tensors that
have weights in a damaged part, are named."""


@click.command(epilog=EPILOG)
@engine_options
@click.option("--verify", "verifies", is_flag=True, help="Compare the model's packed file with its checksums.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(wishes: dict[str, Any], verifies: bool, as_json: bool) -> int:
    """Say what this machine has, what is missing and what to do.

    With MODEL, a Hugging Face folder or a .gguf file, say also whether it fits and what it will use.
    """
    findings = examine(wishes["cache_dir"], wishes["cpu_isa"])
    try:
        findings += look_at(wishes, verifies)
    except ImportError as error:  # torch or one of its like is broken; looking at the rest was worth it
        findings.append(Finding("model", Verdict.MISSING, f"cannot be looked at: {error}", REINSTALL))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        show(findings)
    return int(any(finding.verdict is Verdict.MISSING for finding in findings))


def look_at(wishes: dict[str, Any], verifies: bool) -> list[Finding]:
    """Look at the model that is named, by the user or by his plan; else at the built-in one."""
    if wishes["model"] is not None:
        return examine_model(wishes, verifies=verifies)
    if wishes["plan_file"] is not None:
        return examine_planned_model(wishes, verifies=verifies)
    return examine_builtin_model(wishes, verifies=verifies)


def show(findings: list[Finding]) -> None:
    """Print one line a finding, and the remedy under those that need one."""
    console = Console(soft_wrap=True, highlight=False)
    for finding in findings:
        mark = f"[{STYLES[finding.verdict]}]{finding.verdict:<8}[/]"
        console.print(f"{mark}{finding.topic:<15}{escape(finding.found)}")
        if finding.remedy:
            console.print(f"{'':<8}{'':<15}[bold]{escape(finding.remedy)}[/]")
